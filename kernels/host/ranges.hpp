// How CPU kernels cut their work: ranges of a fixed size, whatever the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tessera/device/workers.hpp"

namespace tessera::kernels::host {

// Elements of a task of cheap elementwise work: long enough to pay for waking a thread.
inline constexpr std::int64_t kGrain = 16384;

// Calls f(begin, end) for [0, grain), [grain, 2 grain), ... up to count.
template <class F>
inline void for_ranges(Exec& exec, std::int64_t count, std::int64_t grain, F f) {
  parallel_for(exec, (count + grain - 1) / grain,
               [&](std::int64_t task) { f(task * grain, std::min(count, (task + 1) * grain)); });
}

// Rows of a task when each row costs `row_cost` elements of cheap work.
inline std::int64_t row_grain(std::int64_t row_cost) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, row_cost));
}

}  // namespace tessera::kernels::host
