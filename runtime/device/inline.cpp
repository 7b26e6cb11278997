// Runs every body where it is submitted, on the host thread: no queue, nothing to wait for.
#include "runtime/device/executors.hpp"
#include "runtime/device/runner.hpp"

namespace tessera {
namespace {

class InlineExecutor final : public Executor {
 public:
  InlineExecutor(const ExecutorOptions& options, const Observers& observers)
      : runner_(options, observers) {}

  ExecutorKind kind() const override { return ExecutorKind::inlined; }

  void submit(StreamId stream, Tick tick, const Op& op, const Body& body, Joint* joint) override {
    runner_.run({op.name, tick, stream, joint, &body});
  }
  void wait(StreamId, const Event&) override {}
  void block(const Event&) override { runner_.failure().rethrow(); }

 private:
  Runner runner_;
};

}  // namespace

std::unique_ptr<Executor> make_inline(const ExecutorOptions& options, const Observers& observers) {
  return std::make_unique<InlineExecutor>(options, observers);
}

}  // namespace tessera
