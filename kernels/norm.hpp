// RMSNorm and LayerNorm over the last dimension of contiguous [rows, cols], forward and backward.
//
//   rms_norm     rstd = 1 / sqrt(mean(x^2) + eps)      y = x rstd weight
//   layer_norm   rstd = 1 / sqrt(mean(z^2) + eps)      y = z rstd weight + bias, z = x - mean(x)
//
// weight and bias are [cols] of x's dtype, each may be null (1 and 0). The statistics mean and rstd
// are [rows], f32, or f64 when x is f64; they are written forward and read backward.
//
// With a residual the input is x + residual, rounded to x's dtype and written to `sum`; what the
// text calls x is then that sum. Both are contiguous [rows, cols]; `sum` may be x or the residual.
// Sources: Zhang and Sennrich, "Root mean square layer normalization", 2019; Ba, Kiros and Hinton,
// "Layer normalization", 2016.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// Without y, for what is read through the statistics (kernels/quantize.hpp), 16-bit and f32 alone:
// `most`, if given, gets the largest |y| of parts of the rows, a NaN being none; the largest of
// most[0 .. norm_magnitudes(rows)) is that of all.
constexpr std::int64_t norm_magnitudes(std::int64_t rows) {
  return std::clamp<std::int64_t>(rows, 1, 1024);
}

// y may be x, but not `sum`.
struct RmsNormArgs {
  void *y, *rstd;
  const void *x, *weight;
  std::int64_t rows, cols;
  double eps;
  DType dtype;
  const void* residual = nullptr;
  void* sum = nullptr;
  float* most = nullptr;
};

struct LayerNormArgs {
  void *y, *mean, *rstd;
  const void *x, *weight, *bias;
  std::int64_t rows, cols;
  double eps;
  DType dtype;
  const void* residual = nullptr;
  void* sum = nullptr;
  float* most = nullptr;
};

// Parameter gradients are summed over fixed blocks of rows and then over the blocks, in one order
// for any threads.
constexpr std::int64_t norm_block_rows(std::int64_t rows) {
  return std::max<std::int64_t>(32, (rows + 63) / 64);
}
constexpr std::int64_t norm_blocks(std::int64_t rows) {
  return (rows + norm_block_rows(rows) - 1) / norm_block_rows(rows);
}
// Bytes of workspace that norm_backward needs; 0 if it writes neither d_weight nor d_bias.
constexpr std::int64_t norm_workspace_bytes(std::int64_t rows, std::int64_t cols, DType dtype,
                                            bool d_weight, bool d_bias) {
  return norm_blocks(rows) * cols * (int{d_weight} + int{d_bias}) * (dtype == DType::f64 ? 8 : 4);
}
static_assert(norm_blocks(0) == 0 && norm_blocks(1) == 1 && norm_blocks(100000) == 64);

// The backward pass of both: of layer_norm when `mean` is given, of rms_norm when it is null.
// dx, d_weight and d_bias may each be null: not wanted. dx has x's dtype and may be dy (not x).
// d_weight and d_bias have grad_dtype, x's or f32 for 16-bit x, and are written as  scale *
// gradient + (accumulate ? old : 0). d_sum, if given, is the gradient that reaches the sum from
// elsewhere, [rows, cols] of x's dtype: it is added to the norm's part of dx, each rounded to that
// dtype, as separate operations would. dx may be d_sum.
struct NormBackwardArgs {
  void *dx, *d_weight, *d_bias;
  const void *x, *dy, *weight, *mean, *rstd;
  void* workspace;
  std::int64_t rows;
  std::int32_t cols;
  float scale;
  DType dtype, grad_dtype;
  bool accumulate;
  const void* d_sum = nullptr;
};
constexpr int launches_of(const NormBackwardArgs& a) {
  return a.d_weight != nullptr || a.d_bias != nullptr ? 2 : 1;
}

}  // namespace tessera::kernels
