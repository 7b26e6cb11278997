// What cases of elementwise kernels share: views, casts and single operations in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>

#include "tests/kernels/case.hpp"

namespace kernel_test {

// Offset of element `linear` of `shape` under `strides`.
inline std::int64_t offset_in(std::int64_t linear, int ndim, const std::int32_t* shape,
                              const std::int32_t* strides) {
  std::int64_t at = 0;
  for (int d = ndim - 1; d >= 0; --d) {
    at += linear % shape[d] * strides[d];
    linear /= shape[d];
  }
  return at;
}

// `x`, a floating number or one that fits, as a copy casts it to `dtype`: truncated and saturated
// to integers, NaN to 0, != 0 to boolean, rounded otherwise.
inline double cast_to(DType dtype, double x) {
  if (dtype == boolean) return x != 0;
  if (is_floating(dtype)) return rounded_to(dtype, x);
  if (std::isnan(x)) return 0;
  if (dtype == u8) return std::clamp(std::trunc(x), 0., 255.) + 0.0;
  const double above = dtype == i32 ? 0x1p31 : 0x1p63;
  // As a double, the largest i64 is the number above it.
  return std::clamp(std::trunc(x), -above, dtype == i32 ? above - 1 : above) + 0.0;  // not -0
}

// 0.5 (1 + tanh(u)) is 1 / (1 + exp(-2 u)), whose sum loses no digits where u is below 0.
inline double gelu_of(double x) {
  return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
inline double slope_of_gelu(double x) {
  const double root = std::sqrt(2 / M_PI), u = root * (x + 0.044715 * x * x * x),
               s = 1 / (1 + std::exp(-2 * u));
  return s + x * s * (1 - s) * 2 * root * (1 + 3 * 0.044715 * x * x);
}

// Values at which casts saturate, overflow, round to even or lose a sign.
inline void make_special(Operand& x) {
  const double inf = std::numeric_limits<double>::infinity();
  const double values[] = {0.0,   -0.0,  inf,     -inf,  std::numeric_limits<double>::quiet_NaN(),
                           0.5,   -0.5,  65520,   1e-7,  -3e9,
                           3e9,   1e19,  -1e19,   1.003, 1e-40,
                           257.0, 2.999, 16777217};
  const std::int64_t n = std::min<std::int64_t>(x.size(), std::size(values));
  for (std::int64_t i = 0; i < n; ++i)
    if (is_floating(x.dtype())) x.set(i, values[i]);
  if (x.dtype() == i64 && n > 1) {
    x.set(0, 0x1p62 + 0x1p37);  // between two floats
    x.set(1, -9007199254740994.0);
  }
}

}  // namespace kernel_test
