// Softmax over the last dimension of a contiguous [rows, cols] view, and its derivative.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// y = exp(x - max(x)) / sum(exp(x - max(x))), per row. Floating; y may be x. A row of -inf gives
// NaN.
struct SoftmaxArgs {
  void* y;
  const void* x;
  std::int64_t rows, cols;
  DType dtype;
};
static_assert(sizeof(SoftmaxArgs) <= kArgsBytes && std::is_trivially_copyable_v<SoftmaxArgs>);

// dx = y (dy - sum(y dy)), per row. dx may be y or dy.
struct SoftmaxBackwardArgs {
  void* dx;
  const void *y, *dy;
  std::int64_t rows, cols;
  DType dtype;
};
static_assert(sizeof(SoftmaxBackwardArgs) <= kArgsBytes &&
              std::is_trivially_copyable_v<SoftmaxBackwardArgs>);

struct Softmax {
  Kernel<SoftmaxArgs> softmax;
  Kernel<SoftmaxBackwardArgs> softmax_backward;
};

}  // namespace tessera::kernels
