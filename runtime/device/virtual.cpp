// Planning: clocks and observers see the program, no body runs, and every event is complete at
// once.
#include "runtime/device/executors.hpp"

namespace tessera {
namespace {

class VirtualExecutor final : public Executor {
 public:
  explicit VirtualExecutor(const Observers& observers) : report_(observers) {}

  ExecutorKind kind() const override { return ExecutorKind::virtual_; }
  void submit(StreamId stream, Tick tick, const Op& op, const Body&, Joint* joint) override {
    report_.launched(stream, tick, op, joint);
  }
  void record(Event& event) override { report_.recorded(event); }
  void wait(StreamId stream, const Event& event) override { report_.waited(stream, event); }
  void block(const Event& event) override { report_.blocked(event); }

 private:
  Report report_;
};

}  // namespace

std::unique_ptr<Executor> make_virtual(const Observers& observers) {
  return std::make_unique<VirtualExecutor>(observers);
}

}  // namespace tessera
