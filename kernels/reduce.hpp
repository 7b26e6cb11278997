// Reductions over the middle dimension of a contiguous [outer, n, inner] view, and the sum of
// squares of a flat array.
//
// 16-bit floats and f32 accumulate in f32, f64 in f64, integers and boolean in i64. Sums are
// blocked: a term of n is rounded min(n, 137 + n / 256) times at most, and the bits depend on the
// shape only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/kernel.hpp"
#include "tessera/kernels/ops.hpp"

namespace tessera::kernels {

// sum, sumsq and mean: out_dtype is the input's, or f32 for 16-bit inputs, or i64 for integers and
// boolean (sum only). max, min: the input's dtype; NaN wins. argmax, argmin: i64, the first of
// equal ones; the first NaN wins. n == 0 gives 0 for sum and sumsq, NaN for mean, the lowest
// (highest) value for max (min) and 0 for argmax and argmin.
//
// out[o, i] = op over j of in[o, j, i]; of floating sum and mean `scale` times that, added to what
// is there where `accumulate`, and rounded once. `out` does not overlap `in`.
struct ReduceArgs {
  void* out;
  const void* in;
  std::int64_t outer, n, inner;
  ReduceOp op;
  DType dtype, out_dtype;
  bool accumulate = false;
  double scale = 1;
};
// On a GPU long sums are those of parts, and then their sum: of so many elements where inner is 1,
// else of so many rows.
inline constexpr std::int64_t kSumElements = 16 * 1024, kSumRows = 256;
// Up to so many rows a block goes through all of them for 32 bytes of columns, in one launch, where
// there are columns for so many blocks (kernels/reduce.cu: why).
inline constexpr std::int64_t kSumRowsAtOnce = 16 * 1024, kSumBlocks = 48;
inline bool is_one_launch(const ReduceArgs& a) {
  const auto row_bytes = a.inner * static_cast<std::int64_t>(size_bytes(a.dtype));
  return a.n <= (a.inner == 1 ? kSumElements : kSumRows) ||
         (a.inner > 1 && is_floating(a.dtype) && a.n <= kSumRowsAtOnce && row_bytes % 16 == 0 &&
          a.outer * row_bytes >= 32 * kSumBlocks &&
          reinterpret_cast<std::uintptr_t>(a.in) % 16 == 0);
}
inline int launches_of(const ReduceArgs& a) {
  const bool is_sum = a.op == ReduceOp::sum || a.op == ReduceOp::mean || a.op == ReduceOp::sumsq;
  return is_sum && !is_one_launch(a) ? 2 : 1;
}

// *out = (accumulate ? *out : 0) + the squares of all elements of so many arrays, in[i] of
// count[i], f32; `out` is f32 or f64. Accumulates in f64.
//
// The sum over more arrays takes several calls, which accumulate behind the first. With `parts` a
// GPU then adds all of it up in the last call: parts has sums of `part` elements of the arrays, at
// least one of each, in order, `parts_before` of which are of earlier calls. Without it a call has
// one array.
inline constexpr int kSumsqArrays = 5;
struct SumsqFlatArgs {
  void* out;
  const float* in[kSumsqArrays];
  std::int64_t count[kSumsqArrays];
  std::int32_t arrays;
  DType out_dtype;
  bool accumulate, is_last = true;
  double* parts = nullptr;
  std::int64_t part = 0, parts_before = 0;
};
constexpr int launches_of(const SumsqFlatArgs& a) {
  return (a.parts ? a.is_last : a.count[0] > kSumElements) ? 2 : 1;
}
constexpr std::int64_t parts_of(std::int64_t count, std::int64_t part) {
  return std::max<std::int64_t>(1, (count + part - 1) / part);
}
constexpr std::int64_t parts_of(const SumsqFlatArgs& a) {
  std::int64_t parts = 0;
  for (int i = 0; i < a.arrays; ++i) parts += parts_of(a.count[i], a.part);
  return parts;
}
// The part of arrays that have so many elements together: no more parts than a block adds up soon.
constexpr std::int64_t sumsq_part(std::int64_t elements) {
  return std::max(kSumElements, elements / 8192 / 1024 * 1024 + 1024);
}
static_assert(sumsq_part(1) == kSumElements && sumsq_part(8192ll * 20480) == 21504);

}  // namespace tessera::kernels
