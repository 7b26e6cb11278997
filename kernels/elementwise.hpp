// Elementwise kernels: unary, binary, scalar, where, fill, arange, accumulate, SwiGLU.
//
// Operands are strided views with the shape of the output; strides count elements, 0 repeats an
// element (broadcast). `ndim == 0` says that all operands are contiguous and `count` elements long:
// the fast path. Otherwise shape[0..ndim) is the common shape, slowest dimension first, and `count`
// its product. Callers merge dimensions that can be merged; a shape that still needs more than the
// constants below is made contiguous first.
//
// Aliasing: an output may be one of its inputs with the same strides; any other overlap is
// undefined. An output stride is never 0 along a dimension longer than 1. 16-bit floats compute in
// f32 and round once; f64 computes in f64; 8-bit floats are copied, cast, filled and chosen by
// `where`, and no other kernel takes them. Integer division truncates, x / 0 and INT_MIN / -1 give
// 0 for integers. Each element's bits depend on its operands only.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/kernel.hpp"
#include "tessera/kernels/ops.hpp"

namespace tessera::kernels {

inline constexpr int kUnaryDims = 6;
inline constexpr int kBinaryDims = 4;
inline constexpr int kScalarDims = 5;
inline constexpr int kWhereDims = 4;
inline constexpr int kAxpbyDims = 5;

// out = op(in). What each operation computes, on which dtypes: tessera/kernels/ops.hpp.
struct UnaryArgs {
  void* out;
  const void* in;
  std::int64_t count;
  std::int32_t shape[kUnaryDims], out_strides[kUnaryDims], in_strides[kUnaryDims];
  UnaryOp op;
  DType out_dtype, in_dtype;
  std::uint8_t ndim;
};

// out = op(a, b). `dtype` is that of a and b.
struct BinaryArgs {
  void* out;
  const void *a, *b;
  std::int64_t count;
  std::int32_t shape[kBinaryDims], out_strides[kBinaryDims], a_strides[kBinaryDims],
      b_strides[kBinaryDims];
  BinaryOp op;
  DType dtype;
  std::uint8_t ndim;
};

// out = op(in, scalar), or op(scalar, in) when `scalar_left`. The scalar is rounded to the
// computing type first.
struct ScalarArgs {
  void* out;
  const void* in;
  double scalar;
  std::int64_t count;
  std::int32_t shape[kScalarDims], out_strides[kScalarDims], in_strides[kScalarDims];
  BinaryOp op;
  DType dtype;
  std::uint8_t ndim;
  bool scalar_left;
};

// out = condition ? a : b. `out` is contiguous; condition is boolean; a, b and out have `dtype`,
// any. At most 2^31 - 1 elements per dimension; there is no `count`: the shape is always given,
// contiguous operands as one dimension.
struct WhereArgs {
  void* out;
  const void *condition, *a, *b;
  std::int32_t shape[kWhereDims], condition_strides[kWhereDims], a_strides[kWhereDims],
      b_strides[kWhereDims];
  DType dtype;
  std::uint8_t ndim;
};

// out = value (cast as `copy` casts from f64).
struct FillArgs {
  void* out;
  double value;
  std::int64_t count;
  std::int32_t shape[kUnaryDims], out_strides[kUnaryDims];
  DType dtype;
  std::uint8_t ndim;
};

// out[i] = start + i * step, contiguous, computed in f64.
struct ArangeArgs {
  void* out;
  double start, step;
  std::int64_t count;
  DType dtype;
};

// y = alpha x + beta y, floating dtypes, x and y may differ; computed in f64 if either is f64, else
// in f32, rounded once. beta == 0 never reads y. This is how gradients are accumulated.
struct AxpbyArgs {
  void* y;
  const void* x;
  double alpha, beta;
  std::int64_t count;
  std::int32_t shape[kAxpbyDims], y_strides[kAxpbyDims], x_strides[kAxpbyDims];
  DType y_dtype, x_dtype;
  std::uint8_t ndim;
};

// out = silu(gate) * up over [rows, cols]; rows lie `*_stride` elements apart, columns are
// contiguous, so that gate and up may be the halves of one fused projection. `out` may be gate or
// up.
struct SwigluArgs {
  void* out;
  const void *gate, *up;
  std::int64_t rows, cols, out_stride, gate_stride, up_stride;
  DType dtype;
};

// The kernels that move values and compute nothing, but for operations of UnaryOp other than copy:
// those that take 8-bit floats.
template <class Args>
inline constexpr bool kTakesStored =
    std::is_same_v<Args, UnaryArgs> || std::is_same_v<Args, FillArgs> ||
    std::is_same_v<Args, WhereArgs>;

// d_gate = d_out up silu'(gate), d_up = d_out silu(gate). d_gate and d_up may alias gate and up,
// respectively.
struct SwigluBackwardArgs {
  void *d_gate, *d_up;
  const void *gate, *up, *d_out;
  std::int64_t rows, cols;
  std::int64_t d_gate_stride, d_up_stride, gate_stride, up_stride, d_out_stride;
  DType dtype;
};

}  // namespace tessera::kernels
