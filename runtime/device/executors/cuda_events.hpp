// Events of a GPU: made, reused, and those that time operations.
#pragma once

#include <memory>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/detail/device/driver.hpp"
#include "tessera/device/event.hpp"

namespace tessera {

inline void check_driver(DriverError error, const char* what) {
  if (error) throw DeviceError(concat("cuda: ", what, ": ", error));
}

inline std::shared_ptr<void> make_event(const Driver& driver, DriverError (*make)(void** event)) {
  void* event = nullptr;
  check_driver(make(&event), "an event could not be made");
  return {event, [&driver](void* e) { driver.end_event(e); }};
}
inline std::shared_ptr<void> make_event(const Driver& driver) {
  return make_event(driver, driver.make_event);
}

// Native events for reuse: one that nobody else holds is free. In steady state nothing is made and
// nothing allocated. Threads: the host thread.
class EventPool {
 public:
  EventPool(const Driver& driver, DriverError (*make)(void** event))
      : driver_(driver), make_(make) {}

  const std::shared_ptr<void>& take() {
    for (std::size_t i = 0; i < events_.size(); ++i) {
      next_ = (next_ + 1) % events_.size();
      if (events_[next_].use_count() == 1) return events_[next_];
    }
    events_.push_back(make_event(driver_, make_));
    return events_.back();
  }

 private:
  const Driver& driver_;
  DriverError (*const make_)(void** event);
  std::vector<std::shared_ptr<void>> events_;
  std::size_t next_ = 0;
};

// An operation between two timers, until the host has seen its end.
struct TimedOperation {
  const char* name;
  StreamId stream;
  Tick tick;
  std::shared_ptr<void> begin, end;
};

// A wait of a stream for another one, between two timers, until the host has seen an operation that
// came after it.
struct TimedWait {
  StreamId stream;
  Tick after;  // the operation that was the stream's last
  std::shared_ptr<void> begin, end;
};

}  // namespace tessera
