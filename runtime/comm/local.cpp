#include "runtime/comm/local.hpp"

#include <algorithm>

#include "runtime/comm/plain_memory.hpp"
#include "runtime/comm/pull.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera::comm {
namespace {

// Publishes in one phase and pulls in the next; the executor meets between them and afterwards, so
// a cell and the sends behind it stay as they are while peers read them.
class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(DeviceContext& context, LocalWorld& world, LocalGroup& group,
                    const GroupSeat& seat, std::string_view role, StreamId stream)
      : Communicator(context, group.recorder(seat.rank), seat, role, stream),
        world_(world),
        group_(group),
        shared_(world.role(group, role_name(seat, role))),
        inputs_(group.size()) {
    shared_.cells[static_cast<std::size_t>(seat.rank)].staging =
        plain_memory(context, kStagedBytes);
    for (const LocalRole::Cell& cell : shared_.cells) published_.push_back(&cell.published);
    for (const FlightRecorder& recorder : group.recorders) recorders_.push_back(&recorder);
    for (const int peer : group.ranks)
      link_.far.push_back(world.placement().is_far(group.name_of(seat.rank), peer));
    if (std::ranges::count(link_.far, 1) == 0)
      link_.far.clear();
    else
      link_.landing = plain_memory(context, kLandingBytes);
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
    world_.submitting(group_, shared_, rank(), submitted());
    Stream(context_, stream()).launch_collective(op, &shared_.barrier, Part{this, call});
  }

  void show(const GroupCall& call, Exec& exec) {
    recorder_.started(call.seq, stream());
    LocalRole::Cell& mine = shared_.cells[static_cast<std::size_t>(rank())];
    mine.single = call.single;
    mine.items = call.prepared ? call.prepared : &mine.single;
    publish(mine.published, call, 0);
    const ItemMover mover(exec, world_.placement().gpus.empty() ? nullptr : &link_);
    stage(mover, mine.staging.get(), call.items(), rank(), size());
    mover.finish();
  }

  void take(const GroupCall& call, Exec& exec) {
    check_agreement(published_, ranks(), role(), recorders_);
    const ItemMover mover(exec, world_.placement().gpus.empty() ? nullptr : &link_);
    pull(mover, call.items(), rank(), size(), inputs_, Peers{shared_});
    mover.finish();
    recorder_.done(call.seq, stream());
  }

  LocalWorld& world_;
  LocalGroup& group_;
  LocalRole& shared_;
  std::vector<const void*> inputs_;  // of one sum; the stream's
  PeerLink link_;
  std::vector<const Published*> published_;
  std::vector<const FlightRecorder*> recorders_;
};

class LocalBackendGroup final : public World::Backend::Group {
 public:
  LocalBackendGroup(LocalWorld& world, LocalGroup& group, int rank, PlainArena& arena)
      : world_(world), group_(group), rank_(rank), arena_(arena) {}

  std::unique_ptr<Communicator> make(DeviceContext& context, const GroupSeat& seat,
                                     std::string_view role, StreamId stream) override {
    return std::make_unique<LocalCommunicator>(context, world_, group_, seat, role, stream);
  }
  std::shared_ptr<SymmetricMemory> allocate(DeviceContext& context, std::int64_t bytes,
                                            std::string_view purpose) override {
    world_.expect_same_size(group_, rank_, bytes, purpose);
    return arena_.allocate(context, bytes);
  }
  FlightRecorder& recorder() noexcept override { return group_.recorder(rank_); }

 private:
  LocalWorld& world_;
  LocalGroup& group_;
  const int rank_;
  PlainArena& arena_;
};

class LocalBackend final : public World::Backend {
 public:
  LocalBackend(std::shared_ptr<LocalWorld> world, int rank)
      : world_(std::move(world)), rank_(rank) {}

  Group* group(DeviceContext&, const GroupSeat& seat) override {
    if (seat.ranks.empty()) return nullptr;
    groups_.push_back(
        std::make_unique<LocalBackendGroup>(*world_, world_->group(seat), seat.rank, arena_));
    return groups_.back().get();
  }
  void commit() noexcept override { world_->commit(rank_); }
  void fail(const std::string& reason) noexcept override { world_->halt(rank_, reason); }
  void abandon(const std::string& reason) noexcept override {
    world_->abort_signal().abort(reason);
  }
  std::string reason() const override { return world_->abort_signal().reason(); }
  void rejoin(DeviceContext& context, std::span<double> largest) override {
    world_->rejoin(context, rank_, largest);
  }
  std::string leave() noexcept override {
    world_->leave(rank_);
    return "";
  }

 private:
  std::shared_ptr<LocalWorld> world_;
  int rank_;
  PlainArena arena_;
  std::vector<std::unique_ptr<LocalBackendGroup>> groups_;
};

}  // namespace

LocalWorld::LocalWorld(int size, const WorldOptions& options)
    : placement_(place_ranks(size, options)),
      recovery_barrier_(recovery_signal_, size),
      timeout_s_(options.timeout_seconds),
      left_(static_cast<std::size_t>(size)),
      halted_(static_cast<std::size_t>(size)),
      contributed_(static_cast<std::size_t>(size)) {
  if (size > 1 && !options.executor.make_scheduler)
    poll_thread_ =
        std::make_unique<PollThread>(std::vector<int>(), [this](int) { look_for_late_calls(); });
}

LocalGroup& LocalWorld::group(const GroupSeat& seat) {
  const std::lock_guard lock(mutex_);
  return groups_.try_emplace({seat.group, seat.ranks}, seat.ranks).first->second;
}

LocalRole& LocalWorld::role(LocalGroup& group, const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto [at, is_new] = group.roles.try_emplace(name, abort_signal_, name, group.size());
  for (std::size_t i = 0; i < group.size() && is_new; ++i)
    if (halted_[static_cast<std::size_t>(group.name_of(static_cast<int>(i)))])
      at->second.barrier.halt(static_cast<int>(i));
  return at->second;
}

std::unique_ptr<World::Backend> make_local_backend(std::shared_ptr<LocalWorld> world, int rank) {
  return std::make_unique<LocalBackend>(std::move(world), rank);
}

}  // namespace tessera::comm
