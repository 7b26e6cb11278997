// Rows of f32 as e4m3 with one scale each, and back: what a gather in 8 bits carries.
//
// The scale s of a row is a power of two, so that dividing and multiplying by it are exact: the
// only error is that of rounding to e4m3, |y - x| <= max(2^-4 |x|, 2^-10 s), where 448 s is at
// least the row's largest |x|, and less than 2 times that above 2^-118. `in` and `out` are [rows,
// cols], contiguous, `codes` likewise, `scales` [rows]. Nothing aliases.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

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

// The least power of two, from 2^-126 on, of which 448 are `most` or more, for most >= 0; NaN of
// infinity. 448 is 1.75 times 2^8, so bits say it.
constexpr float e4m3_scale(float most) {
  const auto bits = std::bit_cast<std::uint32_t>(most);
  if (bits >= 0x7f800000u) return std::bit_cast<float>(0x7fc00000u);
  const int exponent = static_cast<int>(bits >> 23) - ((bits & 0x7fffffu) > 0x600000u ? 7 : 8);
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent < 1 ? 1 : exponent) << 23);
}
static_assert(e4m3_scale(448) == 1 && e4m3_scale(448.00003f) == 2 && e4m3_scale(224) == 0.5f);
static_assert(e4m3_scale(0) == 0x1p-126f && e4m3_scale(0x1p127f) == 0x1p119f);

}  // namespace tessera::kernels
