// Ranks as processes of an mpirun. Ranks of one host see each other's memory and then need MPI no
// more (comm/processes); between hosts go messages (mpi_messages.cpp).
#include "runtime/comm/mpi/mpi.hpp"

#include <algorithm>
#include <atomic>

#include "runtime/base/wait.hpp"
#include "runtime/comm/mpi/mpi_bootstrap.hpp"
#include "runtime/comm/mpi/mpi_group.hpp"
#include "runtime/comm/processes/process_backend.hpp"
#include "runtime/comm/world_state.hpp"
#include "tessera/comm/world.hpp"

namespace tessera {
namespace comm {
namespace {

enum Word : int { kFailed, kLost };  // what one host tells another

class MpiBackend final : public ProcessBackend {
 public:
  // `all` is `mpi`. Collective over it.
  MpiBackend(MpiBootstrap& mpi, std::unique_ptr<Bootstrap> all, const WorldOptions& options);
  ~MpiBackend() override { stop_watching(); }  // first: it looks beyond this host
  MpiBackend(const MpiBackend&) = delete;
  MpiBackend& operator=(const MpiBackend&) = delete;

  // What messages have begun can't be waited for where a peer gives up.
  void fail(const std::string& reason) noexcept override {
    if (sends_messages()) return abandon(reason);
    ProcessBackend::fail(reason);
  }
  void rejoin(DeviceContext& context, std::span<double> largest) override;

 private:
  std::unique_ptr<ProcessGroup> make_group(std::unique_ptr<Bootstrap> members, std::string name,
                                           std::span<const int> hosts) override;
  void drain() override;
  bool meet_other_hosts(const std::string& why) override;
  void end_alone() noexcept override;

  bool sends_messages() const { return has_several_hosts() || transport_ == Transport::messages; }
  void look_beyond();
  void tell_failure() noexcept;
  void keep_channels() noexcept;

  const Transport transport_;
  const MPI_Comm all_;
  std::atomic<bool> has_told_ = false;  // other hosts that the world has failed
  PlainArena arena_;
  std::vector<MpiGroup*> groups_;
};

MpiBackend::MpiBackend(MpiBootstrap& mpi, std::unique_ptr<Bootstrap> all,
                       const WorldOptions& options)
    : ProcessBackend(std::move(all), mpi.hosts(), options),
      transport_(options.transport),
      all_(mpi.comm()) {
  TESSERA_EXPECT(std::ranges::count(mpi.Bootstrap::exchange(transport_), transport_) == size(),
                 "World::mpi: ranks were given different transports");
  if (sends_messages())
    world().set_progress([this] {
      int found = 0;
      MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, all_, &found, MPI_STATUS_IGNORE);
    });
  watch(options, [this] { look_beyond(); });
}

std::unique_ptr<ProcessGroup> MpiBackend::make_group(std::unique_ptr<Bootstrap> members,
                                                     std::string name, std::span<const int> hosts) {
  auto group = std::make_unique<MpiGroup>(std::move(members), std::move(name), hosts, world(),
                                          transport_, arena_);
  groups_.push_back(group.get());
  return group;
}

void MpiBackend::rejoin(DeviceContext& context, std::span<double> largest) {
  if (has_several_hosts())
    throw CommError(concat(
        "World::recover: the ranks are on several hosts, which do not meet again after a failure; "
        "end the job and start it again from a checkpoint, or run all ranks on one host. The step "
        "failed because ",
        reason()));
  ProcessBackend::rejoin(context, largest);
}

// Hosts do not see each other's ranks: what fails the world on one is told to all others.
void MpiBackend::look_beyond() {
  if (!has_several_hosts()) return;
  if (world().is_aborted()) return tell_failure();
  int found = 0;
  MPI_Status status;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, all_, &found, &status);
  if (!found) return;
  char reason[sizeof Segment::reason] = {};
  MPI_Recv(reason, sizeof reason, MPI_CHAR, status.MPI_SOURCE, status.MPI_TAG, all_,
           MPI_STATUS_IGNORE);
  if (status.MPI_TAG == kLost)
    world().abort_for_late(reason);
  else
    world().abort(reason);
}

// From memory that stays: a world that has failed on several hosts frees nothing.
void MpiBackend::tell_failure() noexcept {
  if (!has_several_hosts() || !world().is_aborted() || has_told_.exchange(true)) return;
  world().reason();  // stands
  const Segment& first = world().segment(0);
  const HostLayout layout(hosts(), rank());
  for (int host = 0; host < layout.hosts(); ++host) {
    if (host == layout.own_host()) continue;
    MPI_Request sent = MPI_REQUEST_NULL;
    MPI_Isend(first.reason, sizeof first.reason, MPI_CHAR, layout.partner(host, rank()),
              first.lost_is_reason ? kLost : kFailed, all_, &sent);
    MPI_Request_free(&sent);
  }
}

void MpiBackend::drain() {
  for (MpiGroup* const group : groups_) group->drain();
}

void MpiBackend::keep_channels() noexcept {
  for (MpiGroup* const group : groups_) group->keep_channels();
}

bool MpiBackend::meet_other_hosts(const std::string& why) {
  if (!has_several_hosts()) return true;
  tell_failure();
  if (!why.empty()) {
    keep_channels();
    return false;
  }
  meet_beyond(all(), world());  // they come as late as they like
  return true;
}

void MpiBackend::end_alone() noexcept {
  tell_failure();
  keep_channels();
}

}  // namespace
}  // namespace comm

bool World::has_mpi() noexcept { return true; }

World World::mpi(const WorldOptions& options) {
  comm::expect_process_options("World::mpi", options);
  const Wait wait(
      "World::mpi has waited for ranks that have not come", [] { return 0; },
      std::chrono::duration<double>(options.init_timeout_seconds),
      "the time for that (init_timeout_seconds): look what became of the job's other processes, or "
      "raise it");
  auto all = comm::MpiBootstrap::world();
  comm::MpiBootstrap& mpi = *all;
  auto backend = std::make_unique<comm::MpiBackend>(mpi, std::move(all), options);
  const int rank = backend->rank(), size = backend->size();
  const int threads = threads_per_rank(options, backend->ranks_on_my_cores());
  return World(
      std::make_unique<State>(WorldKind::mpi, rank, size, options, threads, std::move(backend)));
}

}  // namespace tessera
