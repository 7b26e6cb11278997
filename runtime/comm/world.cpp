// Worlds: what all kinds share, and the threads of run_local.
#include "tessera/comm/world.hpp"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <optional>
#include <thread>

#include "runtime/base/thread.hpp"
#include "runtime/base/wait.hpp"
#include "runtime/comm/agreement.hpp"
#include "runtime/comm/local.hpp"
#include "runtime/comm/world_state.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/base/text.hpp"
#include "tessera/detail/device/observe/profiler_ranges.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera {

std::string_view name(WorldKind kind) {
  constexpr std::string_view kNames[] = {"single", "local", "mpi", "processes", "nccl", "emulated"};
  return kNames[static_cast<int>(kind)];
}

int threads_per_rank(const WorldOptions& options, int ranks) {
  TESSERA_EXPECT(options.threads >= 0, "WorldOptions: threads is ", options.threads,
                 "; give 0 for as many as there are cores, or a number");
  if (options.threads > 0) return options.threads;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  const int cores = sched_getaffinity(0, sizeof(mask), &mask) == 0
                        ? CPU_COUNT(&mask)
                        : static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, cores / ranks);
}

// ---- State

namespace {

void check_options(const WorldOptions& options, WorldKind kind) {
  TESSERA_EXPECT(options.timeout_seconds > 0 && options.heartbeat_timeout_seconds >= 0,
                 "WorldOptions: timeout_seconds is ", options.timeout_seconds,
                 ", heartbeat_timeout_seconds ", options.heartbeat_timeout_seconds,
                 "; expected more than 0, and at least 0");
  TESSERA_EXPECT(kind == WorldKind::mpi || options.transport == Transport::automatic,
                 "WorldOptions: a world of kind ", name(kind),
                 " sends no messages; leave transport on automatic");
}

Device watched(Device device, const WorldOptions& options) {
  DeviceContext& context = device.context();
  if (options.race_checker) options.race_checker->watch(context);
  if (options.profiler_ranges && context.driver())
    context.add_observer(std::make_shared<ProfilerRanges>(*context.driver()));
  return device;
}

GroupSeat seat_of_all(int rank, int size) {
  GroupSeat seat{.group = kWorldGroup,
                 .ranks = std::vector<int>(static_cast<std::size_t>(size)),
                 .rank = rank};
  std::iota(seat.ranks.begin(), seat.ranks.end(), 0);
  return seat;
}

Device make_device(WorldKind kind, const WorldOptions& options, int rank, int threads,
                   std::shared_ptr<HostScheduler> scheduler) {
  check_options(options, kind);
  const DeviceChoice& choice = options.device;
  TESSERA_EXPECT(choice.kind != DeviceKind::meta,
                 "WorldOptions: ranks can't compute on meta; choose cpu or cuda");
  if (choice.kind == DeviceKind::cpu)
    return Device::cpu({.executor = options.executor,
                        .rank = rank,
                        .threads = threads,
                        .scheduler = std::move(scheduler),
                        .cost = options.cost,
                        .run_bodies = options.run_bodies});
  TESSERA_EXPECT(
      options.executor == ExecutorKind::threaded || options.executor == ExecutorKind::virtual_,
      "WorldOptions: the executor '", name(options.executor),
      "' runs on the CPU; leave it out with a device of kind cuda");
  return Device::cuda({.index = choice.index.value_or(0),
                       .rank = rank,
                       .executor = options.executor == ExecutorKind::virtual_
                                       ? ExecutorKind::virtual_
                                       : ExecutorKind::cuda,
                       .cost = options.cost,
                       .memory = choice.memory,
                       .threads = threads,
                       .tf32 = choice.tf32,
                       .deterministic = choice.deterministic,
                       .module = choice.module});
}

}  // namespace

namespace {

std::string failure_of(int rank, const std::exception_ptr& error) {
  return concat("rank ", rank, " failed: ", describe_exception(error, rank));
}

}  // namespace

World::State::State(WorldKind k, int r, int n, const WorldOptions& options, int threads_each,
                    std::unique_ptr<Backend> b, std::shared_ptr<HostScheduler> scheduler)
    : kind(k),
      rank(r),
      size(n),
      threads(threads_each),
      device(watched(make_device(k, options, r, threads_each, std::move(scheduler)), options)),
      backend(std::move(b)),
      all(device, has_ended, seat_of_all(r, n), {},
          backend->group(device.context(), seat_of_all(r, n))),
      exceptions(std::uncaught_exceptions()) {
  device.context().set_on_commit([this] { backend->commit(); });
}

void World::State::halt(const std::string& reason) {
  backend->fail(reason);
  device.context().recover();
  if (device.context().has_lost_committed()) backend->abandon(reason);
}

// A failed rank tells its peers first, so that its own streams do not wait for them either.
std::exception_ptr World::State::end(const std::string& failure) noexcept {
  if (has_ended) return nullptr;
  bool failed = !failure.empty();
  std::exception_ptr unheard;
  if (failed) backend->fail(failure);
  DeviceContext& context = device.context();
  for (int s = -1; s < kMaxStreams; ++s) {  // at first only to hear of a failure
    const auto stream = static_cast<StreamId>(std::max(s, 0));
    const Tick last = s < 0 ? 0 : context.clock(stream)[stream];
    if (s >= 0 && last <= context.host_clock()[stream]) continue;
    try {
      context.block(s < 0 ? Event{} : context.event_covering(stream, last));
    } catch (...) {
      if (std::exchange(failed, true)) continue;
      unheard = std::current_exception();
      backend->fail(failure_of(rank, unheard));
    }
  }
  if (failed) halt(failure);  // so its memory can go back
  context.drop_kept();
  has_ended = true;
  context.set_on_commit({});
  for_each_group([](RankGroup::State& group) {
    for (Communicator* c : group.communicators()) c->end();
    group.workspace = {};
  });
  const std::string why = backend->leave();
  if (!failed && !why.empty()) unheard = std::make_exception_ptr(CommError(why));
  return unheard;
}

// A model that outlived its world had its last work on this rank alone.
World::State::~State() {
  if (!has_ended) return;
  try {
    device.synchronize();
  } catch (const std::exception& error) {
    log(LogLevel::error, concat("World: rank ", rank, " ends with a failure: ", error.what()));
    device.context().recover();
  }
  device.context().drop_kept();
}

// ---- World

World::World(std::shared_ptr<State> state) : RankGroup(state->all), state_(std::move(state)) {}
World::~World() {
  if (state_.use_count() == 0) return;
  State& s = *state_;
  const bool failed = s.reported || std::uncaught_exceptions() > s.exceptions;
  const auto unheard =
      s.end(failed ? concat("rank ", s.rank, " failed; see its own message") : std::string());
  if (unheard)
    log(LogLevel::error,
        concat("World: rank ", s.rank, " ends with a failure: ", describe_exception(unheard)));
}

void World::end(std::string_view failure) const {
  const auto unheard =
      state_->end(failure.empty() ? "" : concat("rank ", state_->rank, " failed: ", failure));
  if (unheard) std::rethrow_exception(unheard);
}

std::shared_ptr<const World> World::share() const {
  return {state_->shared_from_this(), &state_->shared};
}

WorldKind World::kind() const noexcept { return state_->kind; }
int World::threads() const noexcept { return state_->threads; }

// ---- Recovery

namespace {

// The exception that is being handled, in one line.
std::string what_is_handled() {
  const std::string what = std::current_exception() ? describe_exception() : "it gave the step up";
  return what.substr(0, what.find('\n'));
}

}  // namespace

std::string World::recover(std::string_view cause) const {
  halt(cause);
  return resume();
}

void World::halt(std::string_view cause) const {
  State& s = *state_;
  TESSERA_EXPECT(!s.has_ended, "World::recover: ", comm::kWorldHasEnded);
  const std::string what = cause.empty() ? what_is_handled() : std::string(cause);
  s.halt(concat("rank ", s.rank, " failed: ", what));
}

std::string World::resume(std::span<double> largest) const {
  TESSERA_EXPECT(largest.size() <= kAgreed, "World::resume: ", largest.size(),
                 " numbers; give at most ", kAgreed);
  State& s = *state_;
  const std::string reason = s.backend->reason();
  s.for_each_group([](const RankGroup::State& group) { group.backend->recorder().restart(); });
  // On memory of the world's own: where this throws, its work may run after the caller's frame is
  // gone.
  const std::span<double> agreed = s.all.scalars.first(largest.size());
  std::ranges::copy(largest, agreed.begin());
  s.backend->rejoin(s.device.context(), agreed);
  std::ranges::copy(agreed, largest.begin());
  s.for_each_group([](RankGroup::State& group) {
    for (Communicator* c : group.communicators()) c->restart();
    group.workspace = {};  // some ranks alone may have made theirs
  });
  return reason;
}

// ---- run_local

namespace {

// The exceptions of the ranks of one run, in the order in which they came.
class Failures {
 public:
  explicit Failures(comm::LocalWorld& world) : world_(world) {}

  // Takes the exception in flight and wakes the peers. One that only says that another rank failed
  // does not replace that rank's own.
  void add(int rank) {
    const std::string what = failure_of(rank, std::current_exception());
    const std::lock_guard lock(mutex_);
    const bool echo = world_.is_echo(what);
    if (!first_ || (first_is_echo_ && !echo)) {
      first_ = std::current_exception();
      first_is_echo_ = echo;
    }
    world_.end(rank, what);
    if (others_) return;
    late_ = what + "; and other ranks did not end";
    others_.emplace(late_.c_str(), [] { return 0; });
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  comm::LocalWorld& world_;
  std::mutex mutex_;
  std::exception_ptr first_;
  bool first_is_echo_ = false;
  std::string late_;            // what a watchdog says of
  std::optional<Wait> others_;  // the wait of a rank that failed for the others' ends
};

struct Attached {
  Attached(HostScheduler* s, int r) : scheduler(s), rank(r) {
    if (scheduler) scheduler->attach(rank);
  }
  ~Attached() {
    if (scheduler) scheduler->detach(rank);
  }
  Attached(const Attached&) = delete;
  Attached& operator=(const Attached&) = delete;

  HostScheduler* scheduler;
  int rank;
};

}  // namespace

void run_local(int ranks, const WorldOptions& options, const std::function<void(World&)>& body) {
  TESSERA_EXPECT(ranks >= 1, "run_local: ", ranks, " ranks; give at least 1");
  const int threads = threads_per_rank(options, ranks);
  const auto shared = std::make_shared<comm::LocalWorld>(ranks, options);
  const auto scheduler =
      options.executor.make_scheduler ? options.executor.make_scheduler(ranks) : nullptr;
  Failures failures(*shared);

  const auto run_rank = [&](int rank) {
    const Attached attached(scheduler.get(), rank);
    try {
      World world(std::make_unique<World::State>(
          WorldKind::local, rank, ranks, shared->placement().options_of(rank, options), threads,
          comm::make_local_backend(shared, rank), scheduler));
      try {
        body(world);
        world.end();
      } catch (...) {
        failures.add(rank);
        world.state_->reported = true;
      }
    } catch (...) {
      failures.add(rank);
    }
  };

  {
    std::vector<Thread> rank_threads;
    int rank = 0;
    try {
      for (; rank < ranks; ++rank) rank_threads.emplace_back([&run_rank, rank] { run_rank(rank); });
    } catch (const std::exception&) {  // std::system_error, or no memory to ask for it
      const std::string reason = concat("the system has no thread for rank ", rank);
      for (int missing = rank; missing < ranks; ++missing) shared->end(missing, reason);
      for (int missing = rank; scheduler && missing < ranks; ++missing) scheduler->detach(missing);
      failures.add(rank);
    }
  }
  failures.rethrow();
  shared->expect_same_steps();
}

}  // namespace tessera
