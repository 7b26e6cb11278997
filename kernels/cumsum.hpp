// Running sums along the middle dimension of a contiguous [outer, n, inner] view.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// out[o, j, i] = sum of in[o, k, i] over k <= j, or over k >= j when `reversed`, which is the
// derivative's direction. Floats add up in f64 and each sum is rounded to their dtype once;
// integers and boolean wrap in i64, which `out` then is. `out` does not overlap `in`.
struct CumsumArgs {
  void* out;
  const void* in;
  std::int64_t outer, n, inner;
  DType dtype;
  bool reversed;
};

}  // namespace tessera::kernels
