// Matrix products of 8-bit floats: C = alpha A B^T + beta C + bias, row-major, where A [m, k] and
// B [n, k] are what their codes and scales stand for (kernels/quantize.hpp). Both lie along the
// sum, as the tensor cores of sm_90 read 8 bits:
//
//   y  = x W^T     A = x          B = W
//   dx = dy W      A = dy         B = W transposed
//   dW = dy^T x    A = dy transposed, B = x transposed
#pragma once

#include <cstdint>

#include "kernels/quantize.hpp"

namespace tessera::kernels {

// Codes and C are contiguous and 16-byte aligned, 16 divides n and k. Of a and b at most one is
// e5m2. C and bias [n], which may be null, have c_dtype: f32, bf16 or f16. Sums are made in f32
// over all of k and rounded once, as those of GemmArgs. `fast`: a GPU may keep 14 bits of a sum
// (DeepSeek- AI, "DeepSeek-V3 technical report", 2024, 3.3.2), which forward products bear. beta ==
// 0 never reads C; k == 0 gives beta C + bias. C overlaps nothing.
//
// Scalings: tensor with tensor; rows with rows or blocks, in any order, on sm_90 alone.
struct GemmFp8Args {
  void* c;
  const void *a, *b, *bias;
  const float *a_scales, *b_scales;
  double alpha, beta;
  std::int32_t m, n, k;
  DType a_dtype, b_dtype, c_dtype;
  Scaling a_scaling, b_scaling;
  bool fast;
};

}  // namespace tessera::kernels
