// Dropout from a counter-based generator: the mask depends on (key, offset, element) only and is
// never stored.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// y[e] = keep(e) ? x[e] / (1 - p) : 0, contiguous; keep(e) = unit_float(w) >= p with
// w = philox(key, e / 4 + *device_offset + host_offset)[e % 4]. The derivative is the same kernel
// on the gradient. device_offset is read when the kernel runs, so that a captured step stays right;
// null counts as 0. 0 <= p < 1; p = 1 gives 0. y may be x.
struct DropoutArgs {
  void* y;
  const void* x;
  const std::int64_t* device_offset;
  std::uint64_t key;
  std::int64_t host_offset, count;
  float p;
  DType dtype;
};

}  // namespace tessera::kernels
