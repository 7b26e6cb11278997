// Dropout from a counter-based generator: the mask depends on (key, offset, element) only and is
// never stored.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// y[e] = keep(e) ? x[e] / (1 - p) : 0, contiguous; keep(e) = unit_float(w) >= p with
// w = philox(key, e / 4 + offset)[e % 4]. The derivative is the same kernel on the gradient. Where
// device_key is not null, the key is what lies there when the kernel runs: that of a captured step.
// 0 <= p < 1; p = 1 gives 0. y may be x.
struct DropoutArgs {
  void* y;
  const void* x;
  const std::uint64_t* device_key;
  std::uint64_t key;
  std::int64_t offset, count;
  float p;
  DType dtype;
};

}  // namespace tessera::kernels
