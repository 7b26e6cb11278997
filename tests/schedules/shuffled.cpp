// Appends to the rank's program; the scheduler that all ranks share runs it. See scheduler.hpp.
#include "tests/schedules/shuffled.hpp"

#include "runtime/device/executors/executors.hpp"
#include "tessera/base/error.hpp"
#include "tests/schedules/scheduler.hpp"

namespace tessera::schedules {
namespace {

class ShuffledExecutor final : public Executor {
 public:
  ShuffledExecutor(std::uint64_t seed, std::uint64_t* trace, const ExecutorOptions& options,
                   const Observers& observers)
      : program_(options, observers), report_(observers), alone_(options.scheduler == nullptr) {
    // Alone it is rank 0 of its own schedule, whatever its rank in the world, and this thread is
    // its host.
    number_ = alone_ ? 0 : options.rank;
    scheduler_ = alone_ ? std::make_shared<Scheduler>(seed, 1, trace)
                        : std::dynamic_pointer_cast<Scheduler>(options.scheduler);
    TESSERA_EXPECT(
        scheduler_ != nullptr,
        "shuffled: the scheduler is another executor's; take ExecutorChoice::make_scheduler");
    TESSERA_EXPECT(
        options.cost == CostModel{} && !options.run_bodies,
        "shuffled: a cost model or run_bodies, where operations take the time they take; "
        "they are for 'virtual'");
    scheduler_->enter(number_, program_);
    if (alone_) scheduler_->attach(number_);
  }
  ~ShuffledExecutor() override {
    scheduler_->leave(number_);
    if (alone_) scheduler_->detach(number_);
  }

  void submit(StreamId stream, Tick tick, const Op& op, const Body& body,
              CollectiveBarrier* barrier) override {
    scheduler_->expect_attached(number_);
    report_.launched(stream, tick, op, barrier);
    Program::Entry& entry = program_.queues[index(stream)].add();
    entry.body = body;
    entry.operation = {op.name, tick, stream, barrier};
    program_.fibers[index(stream)].submitted(tick);
  }

  void record(Event& event) override { report_.recorded(event); }

  void wait(StreamId stream, const Event& event) override {
    scheduler_->expect_attached(number_);
    Program::Entry& entry = program_.queues[index(stream)].add();
    entry.event = event;
    entry.is_wait = true;
    report_.waited(stream, event);
  }

  // Hands the baton over even when the event is complete by now: only what the host has blocked on
  // is no choice.
  void block(const Event& event) override {
    if (!known_.covers(event.clock)) {
      scheduler_->block(number_, event);
      known_.merge(event.clock);
      report_.blocked(event);
      for (std::size_t i = 0; i < kMaxStreams; ++i)
        program_.fibers[i].teach_caller(event.clock.ticks[i]);
    }
    program_.runner.failure().rethrow();
  }
  Lost recover() override { return program_.runner.recover(); }

 private:
  Program program_;
  Report report_;
  const bool alone_;
  int number_ = 0;
  std::shared_ptr<Scheduler> scheduler_;
  Clock known_;  // what the host has blocked on
};

}  // namespace
}  // namespace tessera::schedules

namespace tessera::testing {

ExecutorChoice shuffled(std::uint64_t seed, std::uint64_t* trace) {
  return {"shuffled",
          [=](const ExecutorOptions& options, const Observers& observers) {
            return std::make_unique<schedules::ShuffledExecutor>(seed, trace, options, observers);
          },
          [=](int ranks) { return std::make_shared<schedules::Scheduler>(seed, ranks, trace); }};
}

}  // namespace tessera::testing
