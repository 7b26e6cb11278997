// The operations of a device as ranges of a profiler: NVTX on CUDA, as Nsight Systems shows them
// over the kernels that were queued within.
#pragma once

#include <utility>

#include "tessera/detail/device/driver.hpp"
#include "tessera/device/observer.hpp"

namespace tessera {

//   device.context().add_observer(std::make_shared<ProfilerRanges>(*device.context().driver()));
//
// Ordered: on the host thread that queues. No range while a trace times the operations, which
// observers then hear of late. Of an operation that throws nobody hears the end: its range is
// closed by the next launch or block of the device, or when it recovers.
class ProfilerRanges final : public Observer {
 public:
  explicit ProfilerRanges(const Driver& driver) : driver_(driver) {}

  void started(StreamId, Tick, const char* name) override {
    driver_.push_range(name);
    open_ = true;
  }
  void finished(StreamId, Tick, const char*) override { close(); }
  void executor_launched(StreamId, Tick, const Op&, const CollectiveBarrier*) noexcept override {
    close();
  }
  void blocked(const Event&) override { close(); }
  void reset() override { close(); }

 private:
  void close() {
    if (std::exchange(open_, false)) driver_.pop_range();
  }

  const Driver& driver_;
  bool open_ = false;
};

}  // namespace tessera
