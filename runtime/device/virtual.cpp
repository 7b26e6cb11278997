// Planning: clocks and observers see the program, no body runs, and every event is complete at
// once.
#include "runtime/device/executors.hpp"

namespace tessera {
namespace {

class VirtualExecutor final : public Executor {
 public:
  ExecutorKind kind() const override { return ExecutorKind::virtual_; }
  void submit(StreamId, Tick, const Op&, const Body&, Joint*) override {}
  void wait(StreamId, const Event&) override {}
  void block(const Event&) override {}
};

}  // namespace

std::unique_ptr<Executor> make_virtual() { return std::make_unique<VirtualExecutor>(); }

}  // namespace tessera
