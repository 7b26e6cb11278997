// Ranks as processes of an mpirun. Ranks of one host see each other's memory through an MPI_Win and
// then need MPI no more (shm.cpp); ranks of several hosts send messages (mpi_messages.cpp).
#include "runtime/comm/mpi/mpi.hpp"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>

#include "runtime/comm/mpi/mpi_channel.hpp"
#include "runtime/comm/mpi/peer_monitor.hpp"
#include "runtime/comm/plain_memory.hpp"
#include "runtime/comm/world_state.hpp"
#include "tessera/base/checked.hpp"
#include "tessera/base/log.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace comm {
namespace {

// ---- MPI's own life

// MPI starts and ends once in a process: with the first world, unless the program has started it,
// and with the last.
class Session {
 public:
  Session() {
    Life& life = process();
    const std::lock_guard lock(life.mutex);
    int initialized = 0, finalized = 0, provided = 0;
    check(MPI_Initialized(&initialized), "MPI_Initialized");
    check(MPI_Finalized(&finalized), "MPI_Finalized");
    if (finalized)
      throw CommError(
          "World::mpi: MPI has ended in this process, with its last world; keep one world alive "
          "while others come and go");
    if (!initialized) {
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
      life.is_ours = true;
    }
    check(MPI_Query_thread(&provided), "MPI_Query_thread");
    if (provided < MPI_THREAD_MULTIPLE)
      throw CommError(concat("World::mpi: MPI grants thread level ", provided,
                             ", but streams call it from threads of their own; start it with "
                             "MPI_THREAD_MULTIPLE"));
    ++life.worlds;
  }
  ~Session() { end(false); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // The world is gone; the first call counts. Unless all its ranks `met` at its end, MPI is left
  // running, because a peer may never come to MPI_Finalize.
  void end(bool met) noexcept {
    Life& life = process();
    const std::lock_guard lock(life.mutex);
    if (std::exchange(has_ended_, true)) return;
    if (--life.worlds == 0 && life.is_ours && met) MPI_Finalize();
  }

 private:
  struct Life {
    std::mutex mutex;
    int worlds = 0;
    bool is_ours = false;
  };
  static Life& process() {
    static Life life;
    return life;
  }

  bool has_ended_ = false;
};

// ---- Memory that all ranks see

// Memory of all ranks of `comm`, `bytes` each on pages of its own, seen by all. Made and freed
// collectively. MPI aligns to whatever its own header leaves, so a page more is asked for; mappings
// start at pages, so every process comes to the same address.
class ShmAllocation {
 public:
  ShmAllocation(MPI_Comm comm, std::int64_t bytes) {
    const std::int64_t asked = round_up(bytes, kPageBytes) + kPageBytes;
    MPI_Info info = MPI_INFO_NULL;
    check(MPI_Info_create(&info), "MPI_Info_create");
    MPI_Info_set(info, "alloc_shared_noncontig", "true");
    void* mine = nullptr;
    const int made =
        MPI_Win_allocate_shared(asked, 1, info, comm, static_cast<void*>(&mine), &win_);
    MPI_Info_free(&info);
    check(made, "MPI_Win_allocate_shared (is /dev/shm large enough?)");
    int size = 0;
    check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
    for (int r = 0; r < size; ++r) {
      MPI_Aint there = 0;
      int unit = 0;
      void* base = nullptr;
      check(MPI_Win_shared_query(win_, r, &there, &unit, static_cast<void*>(&base)),
            "MPI_Win_shared_query");
      if (there < asked)
        throw CommError(concat("World::mpi: MPI gives rank ", r, " ", there, " bytes of ", asked,
                               "; use another MPI or Transport::messages"));
      auto* const start = static_cast<std::byte*>(base);
      const auto beyond = reinterpret_cast<std::uintptr_t>(base) % kPageBytes;
      bases.push_back(beyond == 0 ? start : start + (kPageBytes - beyond));
    }
  }
  void free() noexcept { MPI_Win_free(&win_); }

  std::vector<std::byte*> bases;  // of all ranks, here

 private:
  MPI_Win win_ = MPI_WIN_NULL;
};

// What a program holds of an allocation. Freed later, when all ranks have let theirs go.
class ShmMemory final : public SymmetricMemory {
 public:
  ShmMemory(std::byte* data, std::int64_t bytes, std::shared_ptr<bool> let_go)
      : let_go_(std::move(let_go)) {
    data_ = data;
    bytes_ = bytes;
  }
  ~ShmMemory() override { *let_go_ = true; }

 private:
  std::shared_ptr<bool> let_go_;
};

// ---- Backend

// Of each exchange buffer of a role. Larger items go through block by block.
constexpr std::size_t kBlockBytes = 4 << 20;

class MpiBackend final : public World::Backend {
 public:
  // Collective over MPI_COMM_WORLD.
  explicit MpiBackend(const WorldOptions& options) {
    check(MPI_Comm_dup(MPI_COMM_WORLD, &all_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(all_, MPI_ERRORS_RETURN);
    check(MPI_Comm_rank(all_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(all_, &size_), "MPI_Comm_size");
    check(MPI_Comm_split_type(all_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &host_),
          "MPI_Comm_split_type");
    MPI_Comm_set_errhandler(host_, MPI_ERRORS_RETURN);
    int on_host = 0;
    check(MPI_Comm_size(host_, &on_host), "MPI_Comm_size");
    int alike[2] = {on_host == size_ && options.transport == Transport::automatic,
                    options.transport == Transport::messages};
    check(MPI_Allreduce(MPI_IN_PLACE, alike, 2, MPI_INT, MPI_MIN, all_), "MPI_Allreduce");
    TESSERA_EXPECT(alike[1] == (options.transport == Transport::messages),
                   "World::mpi: ranks were given different transports");
    pulls_ = alike[0];
    share_segments(on_host, options);
  }

  // A model that outlived its world, on some rank, is gone.
  ~MpiBackend() override {
    if (is_held_) free_all();
  }
  MpiBackend(const MpiBackend&) = delete;
  MpiBackend& operator=(const MpiBackend&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  int ranks_on_my_cores() const;

  std::unique_ptr<Communicator> make(DeviceContext& context, std::string role, StreamId stream,
                                     int rank, int size) override {
    if (pulls_) {
      const auto id = static_cast<BarrierId>(made_++);  // in the order of State's constructor
      return make_shm_communicator(context, *world_, id, std::move(role), stream);
    }
    const std::size_t bytes =
        size > 1 ? std::max(kBlockBytes, static_cast<std::size_t>(size) * 8) : 0;
    channels_.push_back(std::make_unique<MpiChannel>(all_, *world_, bytes));
    return make_message_communicator(context, *world_, *channels_.back(), std::move(role), stream,
                                     rank, size);
  }

  std::shared_ptr<SymmetricMemory> allocate(DeviceContext& context, std::int64_t bytes) override;
  FlightRecorder& recorder() noexcept override { return world_->recorder(world_->rank()); }
  void fail(const std::string& reason) noexcept override {
    has_failed_ = true;
    world_->abort(reason);
  }
  std::string reason() const override { return world_->reason(); }
  void rejoin(DeviceContext&, std::span<double> largest) override;
  void leave() noexcept override;

 private:
  struct Held {
    ShmAllocation allocation;
    std::uint64_t number;
    std::shared_ptr<bool> let_go;
  };

  void share_segments(int on_host, const WorldOptions& options);
  void free_let_go();
  void drain();
  void keep_channels() noexcept;
  void free_all() noexcept;  // collective

  Session session_;  // first: MPI runs as long as the rest
  MPI_Comm all_ = MPI_COMM_NULL, host_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1, made_ = 0;
  std::unique_ptr<ShmAllocation> segments_;
  std::unique_ptr<ShmWorld> world_;  // the ranks of this host
  std::unique_ptr<PeerMonitor> monitor_;
  bool pulls_ = false;  // from memory that all ranks share; else by messages
  bool has_failed_ = false;
  bool is_held_ = false;  // memory, by a model of some rank at the end of the world
  std::vector<Held> held_;
  std::uint64_t allocations_ = 0;
  std::vector<std::unique_ptr<MpiChannel>> channels_;  // one a role, where messages are sent
  PlainArena arena_;
};

void MpiBackend::share_segments(int on_host, const WorldOptions& options) {
  segments_ = std::make_unique<ShmAllocation>(host_, static_cast<std::int64_t>(sizeof(Segment)));
  std::vector<Segment*> segments;
  for (int r = 0; r < on_host; ++r)
    segments.push_back(
        std::launder(reinterpret_cast<Segment*>(segments_->bases[static_cast<std::size_t>(r)])));
  int rank = 0;
  check(MPI_Comm_rank(host_, &rank), "MPI_Comm_rank");
  auto* const own = new (segments_->bases[static_cast<std::size_t>(rank)]) Segment;
  own->rank = rank_;
  own->pid = getpid();
  struct stat status{};
  if (stat("/proc/self/ns/pid", &status) == 0) own->pid_namespace = status.st_ino;
  check(MPI_Barrier(host_), "MPI_Barrier");  // all segments stand
  world_ = std::make_unique<ShmWorld>(std::move(segments), rank, options.timeout_seconds);
  if (!pulls_)
    world_->set_progress([this] {
      int found = 0;
      MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, all_, &found, MPI_STATUS_IGNORE);
    });
  monitor_ = std::make_unique<PeerMonitor>(*world_, options);
}

// Ranks of this host whose affinity mask is this rank's.
int MpiBackend::ranks_on_my_cores() const {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  sched_getaffinity(0, sizeof(mine), &mine);
  int on_host = 1;
  check(MPI_Comm_size(host_, &on_host), "MPI_Comm_size");
  std::vector<cpu_set_t> masks(static_cast<std::size_t>(on_host));
  check(MPI_Allgather(&mine, sizeof(mine), MPI_BYTE, masks.data(), sizeof(mine), MPI_BYTE, host_),
        "MPI_Allgather");
  int sharing = 0;
  for (const cpu_set_t& mask : masks) sharing += CPU_EQUAL(&mask, &mine);
  return sharing;
}

// The ranks meet where a dead peer is noticed before they enter MPI, where it is not.
std::shared_ptr<SymmetricMemory> MpiBackend::allocate(DeviceContext& context, std::int64_t bytes) {
  context.synchronize();  // throws before any rank is inside MPI, where nothing wakes it
  world_->barrier(BarrierId::allocate, "allocate");
  std::int64_t range[2] = {bytes, -bytes};
  check(MPI_Allreduce(MPI_IN_PLACE, range, 2, MPI_INT64_T, MPI_MAX, all_), "MPI_Allreduce");
  TESSERA_EXPECT(range[0] == -range[1], "allocate_symmetric: rank ", rank_, " asks for ", bytes,
                 " bytes, other ranks for ", -range[1], " to ", range[0],
                 "; every rank must ask for the same");
  if (!pulls_) return arena_.allocate(context, bytes);
  free_let_go();
  const std::int64_t rounded = round_up(bytes, kPageBytes);
  held_.push_back({ShmAllocation(host_, rounded), ++allocations_, std::make_shared<bool>(false)});
  const Held& made = held_.back();
  world_->add({made.number, rounded, made.allocation.bases});
  return std::make_shared<ShmMemory>(made.allocation.bases[static_cast<std::size_t>(rank_)],
                                     rounded, made.let_go);
}

void MpiBackend::free_let_go() {
  std::vector<int> free;
  for (const Held& held : held_) free.push_back(*held.let_go);
  check(MPI_Allreduce(MPI_IN_PLACE, free.data(), static_cast<int>(free.size()), MPI_INT, MPI_MIN,
                      host_),
        "MPI_Allreduce");
  std::size_t i = 0;
  std::erase_if(held_, [&](Held& held) {
    if (!free[i++]) return false;
    world_->remove(held.number);
    held.allocation.free();
    return true;
  });
}

void MpiBackend::rejoin(DeviceContext&, std::span<double> largest) {
  if (!pulls_ && world_->size() != size_)
    throw CommError(concat(
        "World::recover: the ranks are on several hosts, which do not hear of each other's "
        "failures; end the job and start it again from a checkpoint, or run all ranks on one "
        "host. The step failed because ",
        reason()));
  world_->rejoin(largest, [this] { drain(); });
}

void MpiBackend::drain() {
  for (const auto& channel : channels_) channel->drain();
}

// To the end of the process: MPI may still send from them.
void MpiBackend::keep_channels() noexcept {
  for (auto& channel : channels_) {
    [[maybe_unused]] const MpiChannel* const kept = channel.release();
  }
}

void MpiBackend::leave() noexcept {
  try {
    world_->leave();
    world_->barrier(BarrierId::shutdown, "end");
    if (world_->size() != size_) {
      // After a failure here ranks of other hosts may never come: they hear of it when we are gone.
      if (world_->is_aborted()) return keep_channels();
      check(MPI_Barrier(all_), "MPI_Barrier");  // they come as late as they like
    }
    drain();
    monitor_.reset();
    int held = std::ranges::any_of(held_, [](const Held& h) { return !*h.let_go; });
    check(MPI_Allreduce(MPI_IN_PLACE, &held, 1, MPI_INT, MPI_MAX, all_), "MPI_Allreduce");
    is_held_ = held != 0;
  } catch (const std::exception& error) {
    keep_channels();
    if (!has_failed_)  // else the program knows
      log(LogLevel::warning,
          concat("World: rank ", rank_, " ends without its peers: ", error.what()));
    return;
  }
  if (!is_held_) free_all();
}

void MpiBackend::free_all() noexcept {
  for (Held& held : held_) held.allocation.free();
  segments_->free();
  for (const auto& channel : channels_) channel->free();
  MPI_Comm_free(&host_);
  MPI_Comm_free(&all_);
  session_.end(true);
}

}  // namespace
}  // namespace comm

World World::mpi(const WorldOptions& options) {
  TESSERA_EXPECT(options.device.kind == DeviceKind::cpu,
                 "World::mpi: processes can't reach a GPU's memory through MPI; use ranks as "
                 "threads (--ranks N) on one GPU, or the CPU");
  TESSERA_EXPECT(
      options.executor == ExecutorKind::threaded || options.executor == ExecutorKind::inlined,
      "World::mpi: the ", name(options.executor),
      " executor does not run over processes; use run_local for schedules and World::emulated for "
      "planning");
  auto backend = std::make_unique<comm::MpiBackend>(options);
  const int rank = backend->rank(), size = backend->size();
  const int threads = threads_per_rank(options, backend->ranks_on_my_cores());
  return World(
      std::make_unique<State>(WorldKind::mpi, rank, size, options, threads, std::move(backend)));
}

}  // namespace tessera
