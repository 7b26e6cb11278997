// Reductions over the middle dimension of a contiguous [outer, n, inner] view, and the sum of
// squares of a flat array.
//
// 16-bit floats and f32 accumulate in f32, f64 in f64, integers and boolean in i64. Sums are
// blocked: the error of a sum of n terms is about (log2(n) + c) rounding errors with c below 40,
// and its bits depend on the shape only.
#pragma once

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
constexpr int launches_of(const ReduceArgs& a) {
  const bool is_sum = a.op == ReduceOp::sum || a.op == ReduceOp::mean || a.op == ReduceOp::sumsq;
  return is_sum && a.n > (a.inner == 1 ? kSumElements : kSumRows) ? 2 : 1;
}

// *out = (accumulate ? *out : 0) + sum of in[i]^2; `in` is f32, `out` f32 or f64. Accumulates in
// f64.
struct SumsqFlatArgs {
  void* out;
  const float* in;
  std::int64_t count;
  DType out_dtype;
  bool accumulate;
};
constexpr int launches_of(const SumsqFlatArgs& a) { return a.count > kSumElements ? 2 : 1; }

}  // namespace tessera::kernels
