// Matrices as 8-bit floats with scales, along rows and along columns: the operands of products of
// 8-bit floats (kernels/gemm_fp8.hpp), each of which sums along the rows of both.
//
//   x [rows, cols] ─┬─ codes      [rows, cols]    x   = codes s         y = x W^T, say
//                   └─ transposed [cols, rows]    x^T = transposed s    dW = dy^T x
//
// A scale s is float8_scale of the largest magnitude that it covers, so that rounding to 8 bits is
// the only error: |s code - x| <= max(2^-4 |x|, 2^-10 s) in e4m3, max(2^-3 |x|, 2^-17 s) in e5m2. A
// NaN stays one and is no magnitude; what shares its scale with an infinity becomes NaN.
//
// x is contiguous where it lies in memory, as codes and transposed; all addresses are 16-byte
// aligned, 16 divides cols, and rows where there is `transposed`. `dtype` is f32, bf16 or f16.
// Nothing aliases.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/float8_scale.hpp"
#include "kernels/kernel.hpp"

namespace tessera::kernels {

inline constexpr std::int64_t kScaledBlock = 128;
constexpr std::int64_t scaled_blocks(std::int64_t size) {
  return (size + kScaledBlock - 1) / kScaledBlock;
}

// What shares a scale, in a matrix [rows, cols] of 8-bit floats, and how the scales lie: as
// cuBLASLt reads them (CUBLASLT_MATMUL_MATRIX_SCALE_*). Rejected for blocks: one layout for both,
// which would be another kernel before each product.
enum class Scaling : std::uint8_t {
  tensor,  // all of it: [1]
  rows,    // 128 neighbours of a row: [ceil(cols / 128), rows]
  blocks,  // 128 by 128: [ceil(rows / 128), ceil(cols / 128) up to a multiple of 4], the rest 0
};
// From one row of scales to the next.
constexpr std::int64_t scale_stride(Scaling scaling, std::int64_t rows, std::int64_t cols) {
  return scaling == Scaling::rows ? rows : (scaled_blocks(cols) + 3) / 4 * 4;
}
constexpr std::int64_t scale_count(Scaling scaling, std::int64_t rows, std::int64_t cols) {
  if (scaling == Scaling::tensor) return 1;
  return scaled_blocks(scaling == Scaling::rows ? cols : rows) * scale_stride(scaling, rows, cols);
}
// Where that of element (row, col) lies.
constexpr std::int64_t scale_index(Scaling scaling, std::int64_t stride, std::int64_t row,
                                   std::int64_t col) {
  if (scaling == Scaling::tensor) return 0;
  return scaling == Scaling::rows ? col / kScaledBlock * stride + row
                                  : row / kScaledBlock * stride + col / kScaledBlock;
}
static_assert(scale_count(Scaling::rows, 48, 129) == 2 * 48 &&
              scale_count(Scaling::blocks, 129, 640) == 2 * 8);

// The pieces of `count` elements whose largest magnitudes `amax` writes, cut by `count` alone.
struct AmaxPieces {
  std::int64_t count, length;
};
constexpr AmaxPieces amax_pieces(std::int64_t count) {
  const std::int64_t wanted = std::clamp<std::int64_t>(count / 16384, 1, 1024),
                     length = (count + 16 * wanted - 1) / (16 * wanted) * 16;
  return {length > 0 ? (count + length - 1) / length : 1, length};
}
static_assert(amax_pieces(0).count == 1 && amax_pieces(32784).count == 2);

// most[p] = the largest |x| of piece p, [amax_pieces(count).count]; 16 divides count.
struct AmaxArgs {
  float* most;
  const void* x;
  std::int64_t count;
  DType dtype;
};
// The same of silu(gate) up, rounded to dtype, of [rows, cols] in rows one after another; operands
// as QuantizeSwigluArgs has them.
struct AmaxSwigluArgs {
  float* most;
  const void *gate, *up;
  std::int64_t rows, cols, gate_stride, up_stride;
  DType dtype;
};

// `codes` or `transposed` may be null; each has scales of its own, as its shape says, but for
// Scaling::tensor, whose one scale is in `scales`, and comes from most[0 .. pieces), of which the
// largest is that of x.
struct Quantized {
  void *codes, *transposed;
  float *scales, *transposed_scales;
  const float* most;
  std::int64_t rows, cols;
  std::int32_t pieces;
  DType dtype, to;  // of x; e4m3 or e5m2
  Scaling scaling;
};

struct QuantizeArgs {
  Quantized out;
  const void* x;
};

// x lies nowhere: it is what a norm of kernels/norm.hpp would have written, rounded to dtype,
// (input - mean) rstd weight + bias, in e4m3 and not by blocks. The statistics come from that norm
// without y; mean, weight and bias may be null. input [rows, cols] is contiguous and aligned, as
// weight and bias [cols].
struct QuantizeNormArgs {
  Quantized out;
  const void *input, *weight, *bias;
  const float *mean, *rstd;
};

// x is silu(gate) up, rounded to dtype, in e4m3 and not by blocks. Strides count elements from row
// to row; addresses and rows are aligned, and 16 divides the strides.
struct QuantizeSwigluArgs {
  Quantized out;
  const void *gate, *up;
  std::int64_t gate_stride, up_stride;
};

// f(TypeTag<T>{}) with the type of an 8-bit float.
template <class F>
void visit_float8(DType dtype, F f) {
  if (dtype == DType::e4m3) f(TypeTag<Float8E4M3>{});
  if (dtype == DType::e5m2) f(TypeTag<Float8E5M2>{});
}

}  // namespace tessera::kernels
