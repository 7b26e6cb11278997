// Rows of f32 as e4m3 with one scale each, and back: what a gather in 8 bits carries.
//
// The scale s of a row is float8_scale of its largest |x|; the only error is that of rounding to
// e4m3, |y - x| <= max(2^-4 |x|, 2^-10 s), where 448 s is at least the row's largest |x|, and less
// than 2 times that above 2^-118. `in` and `out` are [rows, cols], contiguous, `codes` likewise,
// `scales` [rows]. Nothing aliases.
#pragma once

#include <cstdint>

#include "kernels/float8_scale.hpp"
#include "kernels/kernel.hpp"

namespace tessera::kernels {

// codes = in / s. A row with an infinity becomes NaN as a whole, a NaN alone stays one.
struct EncodeE4m3Args {
  Float8E4M3* codes;
  float* scales;
  const float* in;
  std::int64_t rows, cols;
};

// out = codes * s, in f32 and then in `dtype`, which is floating.
struct DecodeE4m3Args {
  void* out;
  const Float8E4M3* codes;
  const float* scales;
  std::int64_t rows, cols;
  DType dtype;
};

}  // namespace tessera::kernels
