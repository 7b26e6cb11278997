// Which updates an optimizer has submitted: what a reset asks after a step that failed.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/device/clock.hpp"

namespace tessera {

// The updates that one optimizer has submitted, shared with its groups so that a reset can tell
// which have run.
struct UpdateLog {
  struct Update {
    Tick first = 0, last = 0;  // of its launches that write values, on `stream`
    bool is_cut = false;       // an exception interrupted submitting it: counts as no step
    bool has_dropped = false;  // moments of what was frozen, which do not come back
    // Whether the device skipped it, so that it is no step; blocks. Empty: known to be one.
    std::function<bool()> was_skipped{};
  };
  StreamId stream = StreamId::compute;  // of the groups' device
  std::int64_t steps = 0;               // submitted, without those known not to count
  std::int64_t skipped = 0;             // those, while `told` counts
  // What ranks compare: the number of the last step, whatever set it, and whether or not this rank
  // has asked yet which of them count. 0: none since the optimizer was made, or since a reset.
  std::int64_t told = 0;
  std::vector<Update> queued{};  // of them, those that may still be running
  // The last launch that made arrays of the optimizer's state, and the one that made its tables; 0:
  // none are there.
  Tick prepared = 0, tables = 0;

  bool has_dropped = false;  // moments of what was frozen, since the last update

  void tell() noexcept { told = steps + skipped; }
  void take_back() noexcept { --steps, ++skipped; }  // one that is known not to count
};

}  // namespace tessera
