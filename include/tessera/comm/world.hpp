// The ranks of a program. A World is one rank's view of them: its number, its device, its
// communicators.
//
//   run_local(4, {}, [](World& world) { ... });      four ranks as threads of this process
//   World world = World::single();                   one rank
//   World world = World::mpi();                      one rank of an mpirun
//   World world = World::processes({...});           one process of a job on one machine
//   World world = World::nccl({...});                one process for each of several GPUs
//   World world = World::emulated(3, 512);           rank 3 of 512 without peers: plans, benchmarks
//
// Programs let `ts::run` choose, from the environment.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tessera/comm/group.hpp"

namespace tessera {

class RaceChecker;

// How MPI ranks of one host exchange. automatic: through memory that all of them see. messages: by
// MPI's messages, as ranks of different hosts always do; for tests, and if /dev/shm is too small.
enum class Transport : std::uint8_t { automatic, messages };

// Where the ranks of a world compute.
struct DeviceChoice {
  DeviceKind kind = DeviceKind::cpu;  // or cuda
  // The GPU of all ranks of this process. Unset: rank r of run_local is on GPU r, if there are as
  // many GPUs as ranks. Otherwise all ranks are on the first.
  std::optional<int> index{};
  CudaMemory memory = CudaMemory::pieces;
  bool tf32 = false;
  bool deterministic = true;
  std::string module{};  // see CudaOptions
};

// How NCCL gathers. `zero`: by copy engines, without multiprocessors, wherever it can; it needs
// windows, NCCL 2.28, and a driver of CUDA 12.5, and can where all ranks are on one node.
// `measured`: whichever of the two is faster beside compute, see RankGroup::expect_sizes.
enum class GatherPolicy : std::uint8_t { standard, zero, measured };

// Of World::nccl, and of plans for it: World::emulated on `virtual`, on a GPU.
struct NcclOptions {
  std::string module{};   // libtessera-nccl.so; empty: where libtessera-cuda.so is looked for
  std::string library{};  // of NCCL; empty: libnccl.so.2 of the process, the system, or a toolkit
  // Sums of f32, f64 and integers, too, are exchanged and added in rank order, so that their bits
  // are those of threads.
  bool ordered_sums = false;
  // Symmetric memory is NCCL's, a window of what gathers and reduces. NCCL 2.27 and 2.28 do not ask
  // for an abort in their kernels over windows: once a peer has died, such a call never ends.
  bool windows = false;
  GatherPolicy gather_policy = GatherPolicy::standard;
  // Reductions take at most so many blocks of threads (CTAs) from what computes; 0: as many as NCCL
  // wants. kMeasuredCtas: that, or kFewCtas, whichever is faster beside compute.
  int reduce_max_ctas = 0;
  static constexpr int kMeasuredCtas = -1, kFewCtas = 8;
};

struct WorldOptions {
  DeviceChoice device{};
  // The executor on the CPU. A CUDA device has its own; only `virtual_`, a plan, may replace it.
  ExecutorChoice executor{};
  int threads = 0;  // per rank; 0: cores of the affinity mask over the ranks in it, at least 1
  Transport transport = Transport::automatic;   // `messages`: MPI worlds only
  bool profiler_ranges = false;                 // names a GPU's operations in its profiler: NVTX
  std::shared_ptr<RaceChecker> race_checker{};  // watches all ranks of this process; null for none
  CostModel cost{};         // of `virtual`; a communicator has its own for the wire
  bool run_bodies = false;  // on `virtual`, in worlds of one real rank
  // If a rank waits longer than this for its peers in a collective, it fails on all ranks, and the
  // error says who is missing. An executor with a HostScheduler needs no timeout: it sees by itself
  // when no rank can go on.
  double timeout_seconds = 100;
  // Processes: one of this machine that shows no life for this long fails the world. 0: never, so
  // that debuggers may stop ranks.
  double heartbeat_timeout_seconds = 5;
  // World::processes and World::nccl: for so long a rank waits for the others where they come
  // together. That is for rank 0's name and store, for all ranks there, for what they tell each
  // other of their memory, and for a first call of NCCL. The error lists who has not come.
  // World::mpi cannot end what MPI does: a Watchdog (run/watchdog.hpp) ends the process instead if
  // MPI_Init, and what its ranks exchange until they see each other's memory, takes longer.
  double init_timeout_seconds = 300;
  NcclOptions nccl{};
};

// Which process of a job this is, and where all of them meet. Only `rank` differs between them.
struct ProcessSeat {
  int rank = 0, size = 1;
  std::string host = "127.0.0.1";  // rank 0 serves there
  int port = 29500;                // or the first free one of the next 16
  std::string run_id = "none";     // distinguishes jobs that meet at one port
  int local_rank = 0;              // among the ranks of its machine
  // What gave `host`, `port` and `local_rank`, for messages: "MASTER_ADDR=node1",
  // "MASTER_PORT=29500", "LOCAL_RANK=0". Ranks of one machine must differ in `local_rank_from`,
  // unless it is empty: nobody has given them one.
  std::string host_from{}, port_from{}, local_rank_from{};
};

enum class WorldKind : std::uint8_t { single, local, mpi, processes, nccl, emulated };
std::string_view name(WorldKind kind);

// The group of all ranks. A world ends with this object, or with `end`. Models that were sharded
// over it may live on, and their values can be read. A collective of theirs is then a
// ContractError.
class World : public RankGroup {
 public:
  // The part of a world that each kind supplies; see runtime/comm/.
  class Backend {
   public:
    // A backend's part of a group.
    class Group {
     public:
      virtual ~Group() = default;
      // Makes a communicator. Each rank makes the same ones, in the same order.
      virtual std::unique_ptr<Communicator> make(DeviceContext&, const GroupSeat&,
                                                 std::string_view role, StreamId) = 0;
      virtual std::shared_ptr<SymmetricMemory> allocate(DeviceContext&, std::int64_t bytes,
                                                        std::string_view purpose) = 0;
      // Where this rank's communicators of the group record their calls.
      virtual FlightRecorder& recorder() noexcept = 0;
      virtual bool sums_are_ordered() const noexcept { return true; }
      virtual bool has_windows() const noexcept { return false; }
      virtual void expect_sizes(const RankGroup& /*this one*/, const RankGroup::Sizes&) {}
    };

    virtual ~Backend() = default;
    // Makes a group, which the backend keeps. Collective over the world, in the same order on each
    // rank. The first group is that of all ranks. A rank that is in no group gives an empty seat,
    // and gets null. All ranks agree on who is in which group.
    virtual Group* group(DeviceContext&, const GroupSeat&) = 0;
    // Marks all that the rank has submitted so far: it runs, whatever comes. See
    // DeviceContext::commit.
    virtual void commit() noexcept = 0;
    // The rank has failed. Nothing of this world waits for it any more, here or on peers, except
    // for what it has committed. Peers hear of the first `reason`.
    virtual void fail(const std::string& reason) noexcept = 0;
    // Committed work is lost, too, so nothing waits at all.
    virtual void abandon(const std::string& reason) noexcept = 0;
    // The first reason that was given.
    virtual std::string reason() const = 0;
    // All ranks meet after a failure, with idle devices, and can exchange again on return. Each of
    // `largest`, at most kAgreed, becomes the largest of all ranks. Throws: CommError if a rank has
    // ended.
    virtual void rejoin(DeviceContext&, std::span<double> largest) = 0;
    // The rank ends, with an idle device. Peers that still wait for it must hear of it. Processes
    // wait for each other. This is the last call. Returns why the world has failed, if this rank is
    // well and would not know; otherwise an empty text.
    virtual std::string leave() noexcept = 0;
  };

  static World single(const WorldOptions& options = {});
  // One rank of an mpirun. MPI is finalised with the last MPI world. Executors: threaded and
  // inline. Throws: CommError if this build has no MPI, or if MPI cannot start.
  static World mpi(const WorldOptions& options = {});
  static bool has_mpi() noexcept;  // whether this build has MPI
  // One rank, as a process of one machine, whoever has started it. The processes meet at a store
  // that rank 0 serves, and share memory through /dev/shm, as ranks of `mpi` do. Bits are the same.
  // Executors: threaded and inline. Collective.
  // Throws: DataError, on every rank, if they do not share a /dev/shm. CommError that lists who has
  // not come within init_timeout_seconds, and if /dev/shm is too small.
  static World processes(const ProcessSeat& seat, const WorldOptions& options = {});
  // One rank for each GPU, on one machine or several; NCCL carries what they exchange. The GPU is
  // the one that DeviceChoice names, else the only one that the process sees, else number
  // seat.local_rank. 16-bit sums, maxima and all of `control` are added in rank order, to the bits
  // of threads. Other large sums are NCCL's, see NcclOptions. Collective.
  // Throws: DeviceError as Device::cuda. CommError if NCCL or its module is absent, too old or
  // another version on some rank, if two ranks share a GPU, and if somebody has not come within
  // init_timeout_seconds.
  static World nccl(const ProcessSeat& seat, const WorldOptions& options = {});
  // One rank without peers (PyTorch: fake process group). Gathered chunks of other ranks hold this
  // rank's values scrambled. Reductions give this rank's chunk times the number of ranks. With
  // ExecutorKind::virtual_ nothing runs at all.
  static World emulated(int rank, int size, const WorldOptions& options = {});

  World(const World&) = delete;  // it ends once
  World& operator=(const World&) = delete;
  // Ends the world as `end` does. An exception in flight counts as a failure. What `end` would
  // throw goes to the log.
  ~World();
  // Ends the world while a failure can still be heard. It waits until all that the rank has
  // submitted has run. In worlds of processes it also waits for the peers' ends, and peers hear of
  // `failure`, if there is one. run_local and ts::run call it after their body. Throws: what failed
  // on the device and was not thrown yet; CommError if another process has failed, or if ranks have
  // made different numbers of steps of optimizers.
  void end(std::string_view failure = {}) const;

  // The same world, for a DeviceMesh, which may outlive this object. All meshes get one address.
  std::shared_ptr<const World> share() const;

  WorldKind kind() const noexcept;
  int threads() const noexcept;  // per rank

  // Makes groups: the ranks that give the same list become one, in the order of the list. Every
  // rank of the world calls. It gives a list that holds it, or an empty one and gets null. Lists
  // are equal or have no rank in common. The same call again gives the same group. A group lives as
  // long as what `share` gives.
  //   Throws: ContractError, on every rank, if lists do not fit together. A rank that is not in its
  // own list throws it at once, and its peers get a CommError.
  const RankGroup* split(std::string_view name, std::span<const int> ranks,
                         const GroupStreams& streams = {}) const;

  // Ends a failure, so that the ranks can go on in this process. Every rank calls it once it has
  // caught what a step threw: its own exception, or the CommError that a peer's became here. Queued
  // work runs or is skipped, the ranks meet, and collectives count from the beginning again. Memory
  // keeps what was last written to it. A sharded model is mended by `reset`, which calls this.
  // Returns why the world failed, the same on every rank: the first `cause` that a rank gave, or
  // the exception that it was handling.
  //
  //   rank 0   ── throws ─ recover ─┐ drop what  ┌ all here ┌── collective 1
  //   rank 1   ── waits ────────────┘ is queued ─┴──────────┴── collective 1
  //
  // Throws: CommError if a rank has ended, and if ranks are on several hosts, which do not meet
  // again after a failure. The world is then lost.
  std::string recover(std::string_view cause = {}) const;
  // The two halves of recover. From `halt` on nobody waits for this rank, here or on peers, except
  // for what it had submitted before its last step of an optimizer. On return nothing of this rank
  // is queued.
  void halt(std::string_view cause = {}) const;
  // `resume` has the ranks meet. Each of `largest`, at most kAgreed numbers, becomes the largest of
  // all ranks.
  std::string resume(std::span<double> largest = {}) const;

 private:
  friend void run_local(int, const WorldOptions&, const std::function<void(World&)>&);
  struct State;
  explicit World(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;  // not owned by the one that `share` gives, which lies in it
};

// Runs `body` once per rank, each on a thread of its own, and returns when all are done. If a rank
// throws, its peers get a CommError that names it, instead of waiting for ever. The first exception
// is rethrown, with its rank. Requires: ranks >= 1.
void run_local(int ranks, const WorldOptions& options, const std::function<void(World&)>& body);

}  // namespace tessera
