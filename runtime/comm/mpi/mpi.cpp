// Ranks as processes of an mpirun. Ranks of one host see each other's memory through an MPI_Win and
// then need MPI no more (shm.cpp); between hosts go messages (mpi_messages.cpp).
#include "runtime/comm/mpi/mpi.hpp"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>

#include "runtime/comm/mpi/mpi_group.hpp"
#include "runtime/comm/mpi/peer_monitor.hpp"
#include "runtime/comm/testing.hpp"
#include "runtime/comm/world_state.hpp"
#include "tessera/base/log.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace comm {
namespace {

std::vector<int> pretended_hosts;  // by rank; empty: none

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

// ---- Backend

enum Word : int { kFailed, kLost };  // what one host tells another

class MpiBackend final : public World::Backend {
 public:
  // Collective over MPI_COMM_WORLD.
  explicit MpiBackend(const WorldOptions& options) : transport_(options.transport) {
    check(MPI_Comm_dup(MPI_COMM_WORLD, &all_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(all_, MPI_ERRORS_RETURN);
    check(MPI_Comm_rank(all_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(all_, &size_), "MPI_Comm_size");
    find_hosts();
    int messages[2] = {transport_ == Transport::messages, transport_ != Transport::messages};
    check(MPI_Allreduce(MPI_IN_PLACE, messages, 2, MPI_INT, MPI_MAX, all_), "MPI_Allreduce");
    TESSERA_EXPECT(messages[0] + messages[1] == 1,
                   "World::mpi: ranks were given different transports");
    share_segments(options);
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

  Group* group(DeviceContext& context, const GroupSeat& seat) override;
  void fail(const std::string& reason) noexcept override {
    has_failed_ = true;
    world_->abort(reason);
  }
  std::string reason() const override { return world_->reason(); }
  void rejoin(DeviceContext&, std::span<double> largest) override;
  void leave() noexcept override;

 private:
  void find_hosts();
  void share_segments(const WorldOptions& options);
  bool has_several_hosts() const { return world_->size() != size_; }
  void look_beyond();
  void tell_failure() noexcept;
  void drain();
  void keep_channels() noexcept;
  void free_all() noexcept;  // collective

  Session session_;  // first: MPI runs as long as the rest
  const Transport transport_;
  MPI_Comm all_ = MPI_COMM_NULL, host_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::vector<int> hosts_;  // of each rank: the first rank there
  std::unique_ptr<ShmAllocation> segments_;
  std::unique_ptr<ShmWorld> world_;     // the ranks of this host
  std::atomic<bool> has_told_ = false;  // other hosts that the world has failed
  std::unique_ptr<PeerMonitor> monitor_;
  bool has_failed_ = false;
  bool is_held_ = false;  // memory, by a model of some rank at the end of the world
  PlainArena arena_;
  std::vector<std::unique_ptr<MpiGroup>>
      groups_;  // in the order of making, that of all ranks first
};

void MpiBackend::find_hosts() {
  MPI_Comm machine = MPI_COMM_NULL;
  check(MPI_Comm_split_type(all_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &machine),
        "MPI_Comm_split_type");
  host_ = split(machine, PretendedHosts::host_of(rank_), rank_);
  MPI_Comm_free(&machine);
  int first = rank_;
  check(MPI_Bcast(&first, 1, MPI_INT, 0, host_), "MPI_Bcast");
  hosts_.resize(static_cast<std::size_t>(size_));
  check(MPI_Allgather(&first, 1, MPI_INT, hosts_.data(), 1, MPI_INT, all_), "MPI_Allgather");
}

void MpiBackend::share_segments(const WorldOptions& options) {
  segments_ = std::make_unique<ShmAllocation>(host_, static_cast<std::int64_t>(sizeof(Segment)));
  int rank = 0;
  check(MPI_Comm_rank(host_, &rank), "MPI_Comm_rank");
  auto* const own = new (segments_->bases[static_cast<std::size_t>(rank)]) Segment;
  own->rank = rank_;
  own->pid = getpid();
  struct stat status{};
  if (stat("/proc/self/ns/pid", &status) == 0) own->pid_namespace = status.st_ino;
  check(MPI_Barrier(host_), "MPI_Barrier");  // all segments stand
  world_ = std::make_unique<ShmWorld>(views<Segment>(*segments_), rank, options.timeout_seconds);
  if (has_several_hosts() || transport_ == Transport::messages)
    world_->set_progress([this] {
      int found = 0;
      MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, all_, &found, MPI_STATUS_IGNORE);
    });
  monitor_ = std::make_unique<PeerMonitor>(*world_, options, [this] { look_beyond(); });
}

// The ranks meet where a dead peer is noticed before they enter MPI, where it is not.
World::Backend::Group* MpiBackend::group(DeviceContext& context, const GroupSeat& seat) {
  if (!groups_.empty()) {
    context.synchronize();
    groups_[0]->meet();
  }
  const bool is_member = !seat.ranks.empty();
  MPI_Comm members = MPI_COMM_NULL;
  check(MPI_Comm_split(all_, is_member ? seat.ranks[0] : MPI_UNDEFINED, seat.rank, &members),
        "MPI_Comm_split");
  if (!is_member) return nullptr;
  std::vector<int> hosts;
  for (const int rank : seat.ranks) hosts.push_back(hosts_[static_cast<std::size_t>(rank)]);
  groups_.push_back(std::make_unique<MpiGroup>(members, hosts, *world_, transport_, arena_));
  return groups_.back().get();
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

void MpiBackend::rejoin(DeviceContext&, std::span<double> largest) {
  if (has_several_hosts())
    throw CommError(concat(
        "World::recover: the ranks are on several hosts, which do not meet again after a failure; "
        "end the job and start it again from a checkpoint, or run all ranks on one host. The step "
        "failed because ",
        reason()));
  world_->rejoin(largest, [this] { drain(); });
}

// Hosts do not see each other's ranks: what fails the world on one is told to all others.
void MpiBackend::look_beyond() {
  if (!has_several_hosts()) return;
  if (world_->is_aborted()) return tell_failure();
  int found = 0;
  MPI_Status status;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, all_, &found, &status);
  if (!found) return;
  char reason[sizeof Segment::reason] = {};
  MPI_Recv(reason, sizeof reason, MPI_CHAR, status.MPI_SOURCE, status.MPI_TAG, all_,
           MPI_STATUS_IGNORE);
  if (status.MPI_TAG == kLost)
    world_->abort_for_late(reason);
  else
    world_->abort(reason);
}

// From memory that stays: a world that has failed on several hosts frees nothing.
void MpiBackend::tell_failure() noexcept {
  if (!has_several_hosts() || !world_->is_aborted() || has_told_.exchange(true)) return;
  world_->reason();  // stands
  const Segment& first = world_->segment(0);
  const HostLayout layout(hosts_, rank_);
  for (int host = 0; host < layout.hosts(); ++host) {
    if (host == layout.own_host()) continue;
    MPI_Request sent = MPI_REQUEST_NULL;
    MPI_Isend(first.reason, sizeof first.reason, MPI_CHAR, layout.partner(host, rank_),
              first.lost_is_reason ? kLost : kFailed, all_, &sent);
    MPI_Request_free(&sent);
  }
}

void MpiBackend::drain() {
  for (const auto& group : groups_) group->drain();
}

void MpiBackend::keep_channels() noexcept {
  for (const auto& group : groups_) group->keep_channels();
}

void MpiBackend::leave() noexcept {
  try {
    world_->leave();
    world_->shut_down();
    if (has_several_hosts()) {
      tell_failure();
      if (world_->is_aborted()) return keep_channels();
      meet_beyond(all_, *world_);  // they come as late as they like
    }
    drain();
    monitor_.reset();
    int held = std::ranges::any_of(groups_, [](const auto& g) { return g->is_held(); });
    check(MPI_Allreduce(MPI_IN_PLACE, &held, 1, MPI_INT, MPI_MAX, all_), "MPI_Allreduce");
    is_held_ = held != 0;
  } catch (const std::exception& error) {
    tell_failure();
    keep_channels();
    if (!has_failed_)  // else the program knows
      log(LogLevel::warning,
          concat("World: rank ", rank_, " ends without its peers: ", error.what()));
    return;
  }
  if (!is_held_) free_all();
}

// In the order in which all ranks have made them.
void MpiBackend::free_all() noexcept {
  for (const auto& group : groups_) group->free();
  segments_->free();
  MPI_Comm_free(&host_);
  MPI_Comm_free(&all_);
  session_.end(true);
}

}  // namespace

PretendedHosts::PretendedHosts(std::vector<int> hosts) { pretended_hosts = std::move(hosts); }
PretendedHosts::~PretendedHosts() { pretended_hosts.clear(); }
int PretendedHosts::host_of(int rank) {
  return pretended_hosts.empty() ? 0 : pretended_hosts.at(static_cast<std::size_t>(rank));
}

}  // namespace comm

World World::mpi(const WorldOptions& options) {
  TESSERA_EXPECT(options.device.kind == DeviceKind::cpu,
                 "World::mpi: processes can't reach a GPU's memory through MPI; use ranks as "
                 "threads (--ranks N), or the CPU");
  TESSERA_EXPECT(
      options.executor == ExecutorKind::threaded || options.executor == ExecutorKind::inlined,
      "World::mpi: the ", tessera::name(options.executor),
      " executor does not run over processes; use run_local for schedules and World::emulated for "
      "planning");
  auto backend = std::make_unique<comm::MpiBackend>(options);
  const int rank = backend->rank(), size = backend->size();
  const int threads = threads_per_rank(options, backend->ranks_on_my_cores());
  return World(
      std::make_unique<State>(WorldKind::mpi, rank, size, options, threads, std::move(backend)));
}

}  // namespace tessera
