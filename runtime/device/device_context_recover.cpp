// The part of DeviceContext that ends a failure, and that keeps one where none can be thrown.
#include <algorithm>

#include "tessera/device/device_context.hpp"

namespace tessera {

void DeviceContext::fail_late() noexcept {
  if (!late_) late_ = std::current_exception();
}

void DeviceContext::rethrow_late() const {
  if (late_) std::rethrow_exception(late_);
}

void DeviceContext::recover() {
  drop_held();
  for (const StreamId s : kStreams) {
    const Tick last = clock(s)[s];
    if (last <= host_[s]) continue;
    const Event event = event_covering(s, last);
    try {
      block(event);
    } catch (...) {  // over all the same: an executor throws what a body threw after it has waited
      host_.merge(event.clock);
    }
  }
  for (Clock& clock : clocks_) clock.merge(host_);
  lost_ = executor_->recover();
  ++recoveries_;
  failure_told_ = false;
  late_ = nullptr;
  drop_kept();
  for (Observer* o : observers_) o->reset();
}

bool DeviceContext::has_lost_committed() const {
  return std::ranges::any_of(
      kStreams, [&](StreamId s) { return lost_.first[s] > 0 && lost_.first[s] <= committed_[s]; });
}

}  // namespace tessera
