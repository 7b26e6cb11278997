// Runs every body where it is submitted, on the host thread: no queue, nothing to wait for.
#include "runtime/device/executors/executors.hpp"
#include "runtime/device/executors/runner.hpp"

namespace tessera {
namespace {

class InlineExecutor final : public Executor {
 public:
  InlineExecutor(const ExecutorOptions& options, const Observers& observers)
      : runner_(options, observers), report_(observers) {}

  void submit(StreamId stream, Tick tick, const Op& op, const Body& body,
              CollectiveBarrier* barrier) override {
    report_.launched(stream, tick, op, barrier);
    // One thread runs all streams: what comes behind a failure on another one would keep it from
    // telling peers, who wait for what is lost.
    runner_.reach(stream);
    runner_.run({op.name, tick, stream, barrier, &body});
  }
  void record(Event& event) override { report_.recorded(event); }
  void wait(StreamId stream, const Event& event) override {
    report_.waited(stream, event);
    runner_.follow(stream, event.clock);
  }
  void block(const Event& event) override {
    report_.blocked(event);
    runner_.failure().rethrow();
  }
  Lost recover() override { return runner_.recover(); }

 private:
  Runner runner_;
  Report report_;
};

}  // namespace

std::unique_ptr<Executor> make_inline(const ExecutorOptions& options, const Observers& observers) {
  return std::make_unique<InlineExecutor>(options, observers);
}

}  // namespace tessera
