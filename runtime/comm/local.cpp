#include "runtime/comm/local.hpp"

#include <algorithm>

#include "runtime/comm/plain_memory.hpp"
#include "runtime/comm/pull.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera::comm {
namespace {

// Publishes in one phase and pulls in the next; the executor meets between them and afterwards, so
// a cell and the sends behind it stay as they are while peers read them.
class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(DeviceContext& context, LocalWorld& world, LocalRole& shared, StreamId stream,
                    int rank)
      : Communicator(context, world.recorder(rank), shared.name, stream, rank, world.size()),
        world_(world),
        shared_(shared),
        inputs_(static_cast<std::size_t>(world.size())),
        published_(static_cast<std::size_t>(world.size())) {
    shared.cells[static_cast<std::size_t>(rank)].staging = plain_memory(context, kStagedBytes);
    for (std::size_t r = 0; r < published_.size(); ++r) published_[r] = &shared.cells[r].published;
    for (int r = 0; r < world.size(); ++r) recorders_.push_back(&world.recorder(r));
  }

 private:
  struct Part {
    LocalCommunicator* self;
    GroupCall call;
    void operator()(Exec& exec) const {
      if (exec.phase == Exec::Phase::publish)
        self->show(call, exec);
      else
        self->take(call, exec);
    }
  };

  struct Peers {
    const LocalRole& shared;
    std::size_t item = 0;
    std::int64_t offset = StagingPlan::kDirect;

    void open(const Collective&, std::size_t i, std::int64_t staged, std::int64_t) {
      item = i, offset = staged;
    }
    const std::byte* send(int peer) const {
      const LocalRole::Cell& cell = shared.cells[static_cast<std::size_t>(peer)];
      if (offset != StagingPlan::kDirect) return cell.staging.get() + offset;
      return static_cast<const std::byte*>(cell.items[item].send);
    }
  };

  void launch(const Op& op, const GroupCall& call) override {
    world_.submitting(shared_, rank(), submitted());
    Stream(context_, stream()).launch_collective(op, &shared_.barrier, Part{this, call});
  }

  void show(const GroupCall& call, Exec& exec) {
    recorder_.started(call.seq, stream());
    LocalRole::Cell& mine = shared_.cells[static_cast<std::size_t>(rank())];
    mine.single = call.single;
    mine.items = call.prepared ? call.prepared : &mine.single;
    publish(mine.published, call, 0);
    stage(Mover(exec), mine.staging.get(), call.items(), rank(), size());
  }

  void take(const GroupCall& call, Exec& exec) {
    check_agreement(published_, role(), recorders_);
    pull(Mover(exec), call.items(), rank(), size(), inputs_, Peers{shared_});
    recorder_.done(call.seq, stream());
  }

  LocalWorld& world_;
  LocalRole& shared_;
  std::vector<const void*> inputs_;  // of one sum; the stream's
  std::vector<const Published*> published_;
  std::vector<const FlightRecorder*> recorders_;
};

class LocalBackend final : public World::Backend {
 public:
  LocalBackend(std::shared_ptr<LocalWorld> world, int rank)
      : world_(std::move(world)), rank_(rank) {}

  std::unique_ptr<Communicator> make(DeviceContext& context, std::string role, StreamId stream, int,
                                     int) override {
    return std::make_unique<LocalCommunicator>(context, *world_, world_->role(role), stream, rank_);
  }
  std::shared_ptr<SymmetricMemory> allocate(DeviceContext& context, std::int64_t bytes) override {
    world_->expect_same_size(rank_, allocations_++, bytes);
    return arena_.allocate(context, bytes);
  }
  FlightRecorder& recorder() noexcept override { return world_->recorder(rank_); }
  void fail(const std::string& reason) noexcept override { world_->abort_signal().abort(reason); }
  std::string reason() const override { return world_->abort_signal().reason(); }
  void rejoin(DeviceContext& context, std::span<double> largest) override {
    Stream(context, StreamId::compute)
        .launch_collective({.name = "recover"}, &world_->recovery_barrier(),
                           [world = world_.get(), rank = rank_, largest](Exec& exec) {
                             if (exec.phase == Exec::Phase::publish)
                               world->contribute(rank, largest);
                             else
                               world->all_reduce_max(largest), world->rearm();
                           });
    context.block(context.record(StreamId::compute));
    allocations_ = 0;
  }
  void leave() noexcept override { world_->leave(rank_); }

 private:
  std::shared_ptr<LocalWorld> world_;
  int rank_;
  std::size_t allocations_ = 0;
  PlainArena arena_;
};

}  // namespace

LocalWorld::LocalWorld(int size, const WorldOptions& options)
    : size_(size),
      recovery_barrier_(recovery_signal_, size),
      timeout_s_(options.timeout_seconds),
      recorders_(static_cast<std::size_t>(size)),
      left_(static_cast<std::size_t>(size)),
      contributed_(static_cast<std::size_t>(size)) {
  if (size > 1 && options.executor != ExecutorKind::shuffled)
    poll_thread_ =
        std::make_unique<PollThread>(std::vector<int>(), [this](int) { look_for_late_calls(); });
}

void LocalWorld::look_for_late_calls() {
  if (abort_signal_.aborted()) return;
  Recorders all;
  std::vector<int> names;
  for (int rank = 0; rank < size_; ++rank) {
    all.push_back(&recorder(rank));
    names.push_back(rank);
  }
  for (int rank = 0; rank < size_; ++rank)
    if (const std::string late = describe_late(all, rank, timeout_s_, names); !late.empty())
      return abort_signal_.abort(late);
}

LocalRole& LocalWorld::role(const std::string& name) {
  const std::lock_guard lock(mutex_);
  auto& role = roles_[name];
  if (!role) role = std::make_unique<LocalRole>(abort_signal_, name, size_);
  return *role;
}

void LocalWorld::submitting(LocalRole& role, int rank, std::uint64_t number) {
  const FlightRecorder& own = recorder(rank);
  const std::uint64_t call = own.last_submitted();
  const std::lock_guard lock(mutex_);
  role.cells[static_cast<std::size_t>(rank)].submitted = number;
  for (int peer = 0; peer < size_; ++peer) {
    const std::uint64_t theirs = recorder(peer).fingerprint_after(call);
    if (theirs != 0 && theirs != own.fingerprint()) expect_same_group(rank, peer);
    if (!left_[static_cast<std::size_t>(peer)]) continue;
    const std::uint64_t met = role.cells[static_cast<std::size_t>(peer)].submitted;
    if (met < number) abort_for_ended(role, peer, rank);
  }
}

void LocalWorld::expect_same_size(int rank, std::size_t n, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (n == allocations_.size()) allocations_.push_back(bytes);
  TESSERA_EXPECT(allocations_[n] == bytes, "allocate_symmetric: rank ", rank, " asks for ", bytes,
                 " bytes in call ", n + 1, ", another rank for ", allocations_[n],
                 "; every rank must ask for the same");
}

std::unique_ptr<World::Backend> make_local_backend(std::shared_ptr<LocalWorld> world, int rank) {
  return std::make_unique<LocalBackend>(std::move(world), rank);
}

}  // namespace tessera::comm
