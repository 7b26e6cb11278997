// The ranks of a program. A World is one rank's view: its number, its device, its communicators.
//
//   run_local(4, {}, [](World& world) { ... });      four ranks as threads of this process
//   World world = World::single();                   one rank
//   World world = World::mpi();                      one rank of an mpirun
//   World world = World::processes({...});           one process of a job on one machine
//   World world = World::nccl({...});                one process for each of several GPUs
//   World world = World::emulated(3, 512);           rank 3 of 512 without peers: plans, benchmarks
//
// Programs let `ts::run` choose from the environment.
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

// How MPI ranks of one host exchange: through memory that all of them see, or by MPI's messages, as
// ranks of different hosts do anyway. For tests, and where /dev/shm is too small.
enum class Transport : std::uint8_t { automatic, messages };

// Where the ranks of a world compute.
struct DeviceChoice {
  DeviceKind kind = DeviceKind::cpu;  // or cuda
  // Of the GPU, for all ranks of this process. None: rank r of run_local on GPU r, where there are
  // as many; else all ranks on the first.
  std::optional<int> index{};
  CudaMemory memory = CudaMemory::pieces;
  bool tf32 = false;
  bool deterministic = true;
  std::string module{};  // see CudaOptions
};

// Of World::nccl.
struct NcclOptions {
  std::string module{};   // libtessera-nccl.so; empty: where libtessera-cuda.so is looked for
  std::string library{};  // of NCCL; empty: libnccl.so.2 of the process, the system, or a toolkit
  // Sums of f32, f64 and integers, too, are exchanged and added in rank order, so that their bits
  // are those of threads.
  bool ordered_sums = false;
  // Symmetric memory is NCCL's, a window of what gathers and reduces (NVLS is known to deadlock
  // with them on some machines). False: memory as any other.
  bool windows = true;
};

struct WorldOptions {
  DeviceChoice device{};
  // On the CPU. On CUDA only `virtual_` is another than its own: a plan.
  ExecutorChoice executor{};
  int threads = 0;  // per rank; 0: cores in the affinity mask / ranks in it, at least 1
  Transport transport = Transport::automatic;   // `messages`: MPI worlds only
  bool profiler_ranges = false;                 // a GPU's operations by name in its profiler: NVTX
  std::shared_ptr<RaceChecker> race_checker{};  // watches all ranks of this process; null for none
  CostModel cost{};         // of `virtual`; the wire's part is each communicator's own
  bool run_bodies = false;  // on `virtual`, in worlds of one real rank
  // A collective in which a rank waits for its peers for longer fails on all ranks, and says who is
  // missing. Not where the executor has a HostScheduler, which sees that by itself.
  double timeout_seconds = 100;
  // Processes: one of this machine that shows no life for so long fails the world. 0: never,
  // so that debuggers may stop ranks.
  double heartbeat_timeout_seconds = 5;
  NcclOptions nccl{};
};

// Which process of a job this is, and where they meet. All but `rank` is the same for all.
struct ProcessSeat {
  int rank = 0, size = 1;
  std::string host = "127.0.0.1";  // rank 0 serves there
  int port = 29500;                // on the first free one of this and the next 16
  std::string run_id = "none";     // tells jobs apart that meet at one port
  double init_timeout_seconds = 300;
  int local_rank = 0;  // among those of its machine
};

enum class WorldKind : std::uint8_t { single, local, mpi, processes, nccl, emulated };
std::string_view name(WorldKind kind);

// The group of all ranks. A world ends with this object, or with `end`. Models that were sharded
// over it may live on, and their values can be read; a collective of theirs is a ContractError.
class World : public RankGroup {
 public:
  // What a kind of world supplies; see runtime/comm/.
  class Backend {
   public:
    // What a group is made of.
    class Group {
     public:
      virtual ~Group() = default;
      // Each rank makes the same ones in the same order.
      virtual std::unique_ptr<Communicator> make(DeviceContext&, const GroupSeat&,
                                                 std::string_view role, StreamId) = 0;
      virtual std::shared_ptr<SymmetricMemory> allocate(DeviceContext&, std::int64_t bytes,
                                                        std::string_view purpose) = 0;
      // Where this rank's communicators of the group record their calls.
      virtual FlightRecorder& recorder() noexcept = 0;
      virtual bool sums_are_ordered() const noexcept { return true; }
    };

    virtual ~Backend() = default;
    // Makes a group, which the backend keeps. Collective over the world, in the same order on each
    // rank; the first is that of all ranks. Ranks that are in none give an empty seat, and get
    // null. All agree on who is in which.
    virtual Group* group(DeviceContext&, const GroupSeat&) = 0;
    // All that the rank has submitted so far is to run, whatever comes: DeviceContext::commit.
    virtual void commit() noexcept = 0;
    // The rank has failed: but for what it has committed nothing of this world waits for it any
    // more, here or on peers, who hear of the first `reason`.
    virtual void fail(const std::string& reason) noexcept = 0;
    // Nothing waits at all: something that was committed is lost.
    virtual void abandon(const std::string& reason) noexcept = 0;
    // That first reason.
    virtual std::string reason() const = 0;
    // All ranks meet after a failure, their devices idle, and can exchange again on return. Each of
    // `largest`, at most kAgreed, becomes the largest of all ranks.  Throws: CommError when a rank
    // has ended.
    virtual void rejoin(DeviceContext&, std::span<double> largest) = 0;
    // The rank ends, its device is idle: peers that still wait for it must hear of it. Last call.
    // Processes wait for each other. Returns why the world has failed: for the rank that all is
    // well with here. Empty where it has not, and where others say so.
    virtual std::string leave() noexcept = 0;
  };

  static World single(const WorldOptions& options = {});
  // Executors: threaded and inline.  Throws: CommError when this build has no MPI, or MPI cannot
  // start. MPI is finalised with the last MPI world.
  static World mpi(const WorldOptions& options = {});
  static bool has_mpi() noexcept;  // this build
  // Ranks as processes of one machine, whoever has started them: they meet at a store that rank 0
  // serves, and share memory through /dev/shm, as ranks of `mpi` do. Bits are the same. Executors:
  // threaded and inline. Collective.
  // Throws: DataError, on every rank, when they do not share a /dev/shm; CommError that names who
  // has not come within init_timeout_seconds, and when /dev/shm is too small.
  static World processes(const ProcessSeat& seat, const WorldOptions& options = {});
  // One rank for each GPU, on one machine or several: NCCL carries what they exchange. The GPU is
  // the only one that the process sees, else that of seat.local_rank, unless DeviceChoice names
  // one. 16-bit sums, maxima and all of `control` are added in rank order, to the bits of threads;
  // other large sums are NCCL's, see NcclOptions. Collective.
  // Throws: DeviceError as Device::cuda; CommError where NCCL or its module is absent, too old or
  // another version on some rank, two ranks share a GPU, or somebody has not come within
  // init_timeout_seconds.
  static World nccl(const ProcessSeat& seat, const WorldOptions& options = {});
  // No peers (PyTorch: fake process group): gathered chunks of other ranks hold this rank's values
  // scrambled, reductions this rank's chunk times the number of ranks. With ExecutorKind::virtual_
  // nothing runs at all.
  static World emulated(int rank, int size, const WorldOptions& options = {});

  World(const World&) = delete;  // it ends once
  World& operator=(const World&) = delete;
  // As `end`; what that would throw goes to the log. An exception in flight is a failure.
  ~World();
  // Ends the world where a failure can still be heard: waits until all that the rank has submitted
  // has run, and in worlds of processes for the peers' ends, who hear of `failure`, if there is
  // one. run_local and ts::run call it behind their body. Throws: what failed on the device, and
  // was not thrown yet; CommError where another process has failed, or ranks have made other
  // numbers of steps of optimizers.
  void end(std::string_view failure = {}) const;

  // The same world for a DeviceMesh, which may outlive this object. One address for all meshes.
  std::shared_ptr<const World> share() const;

  WorldKind kind() const noexcept;
  int threads() const noexcept;  // per rank

  // The ranks that give the same list become a group, in the order of the list. Every rank of the
  // world calls, with a list that holds it, or with an empty one and gets null; lists are equal or
  // have no rank in common. Asked for the same again, it gives the same group. It lives as long as
  // what `share` gives.  Throws: ContractError, on every rank, where lists do not fit together; on
  // a rank that is not in its own list it is thrown at once, and the peers get a CommError.
  const RankGroup* split(std::string_view name, std::span<const int> ranks,
                         const GroupStreams& streams = {}) const;

  // Ends a failure, so that the ranks can go on in this process. Every rank calls it once it has
  // caught what a step threw: its own exception, or the CommError that a peer's became here. What
  // is queued runs or is skipped, the ranks meet, and collectives count from the beginning again.
  // Memory keeps what was last written to it; a sharded model is mended by `reset`, which calls
  // this. Returns why the world failed, the same on every rank: the first `cause` that a rank gave,
  // or else the exception that it was handling.
  //
  //   rank 0   ── throws ─ recover ─┐ drop what  ┌ all here ┌── collective 1
  //   rank 1   ── waits ────────────┘ is queued ─┴──────────┴── collective 1
  //
  // Throws: CommError when a rank has ended, and when ranks are on several hosts, which do not meet
  // again after a failure; the world is then lost.
  std::string recover(std::string_view cause = {}) const;
  // Its halves. From `halt` on nobody waits for this rank, here or on peers, but for what it had
  // submitted before its last step of an optimizer; on return nothing of this rank is queued.
  void halt(std::string_view cause = {}) const;
  // Each of `largest`, at most kAgreed numbers, becomes the largest of all ranks.
  std::string resume(std::span<double> largest = {}) const;

 private:
  friend void run_local(int, const WorldOptions&, const std::function<void(World&)>&);
  struct State;
  explicit World(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;  // not owned by the one that `share` gives, which lies in it
};

// Runs `body` once per rank, each on a thread of its own, and returns when all are done. When a
// rank throws, its peers get a CommError that names it instead of waiting for ever; the first
// exception is rethrown, with its rank.  Requires: ranks >= 1.
void run_local(int ranks, const WorldOptions& options, const std::function<void(World&)>& body);

}  // namespace tessera
