// The operations of a device as ranges of a profiler: NVTX on CUDA, as Nsight Systems shows them
// over the kernels that were queued within.
#pragma once

#include "tessera/device/driver.hpp"
#include "tessera/device/observer.hpp"

namespace tessera {

//   device.context().add_observer(std::make_shared<ProfilerRanges>(*device.context().driver()));
//
// Ordered: on the host thread that queues. No range while a trace times the operations, which
// observers then hear of late.
class ProfilerRanges final : public Observer {
 public:
  explicit ProfilerRanges(const Driver& driver) : driver_(driver) {}

  void started(StreamId, Tick, const char* name) override { driver_.push_range(name); }
  void finished(StreamId, Tick, const char*) override { driver_.pop_range(); }

 private:
  const Driver& driver_;
};

}  // namespace tessera
