// Softmax over the last dimension of a contiguous [rows, cols] view, and its derivative.
#pragma once

#include <cstdint>

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

// dx = y (dy - sum(y dy)), per row. dx may be y or dy.
struct SoftmaxBackwardArgs {
  void* dx;
  const void *y, *dy;
  std::int64_t rows, cols;
  DType dtype;
};

}  // namespace tessera::kernels
