// The scales with which 8-bit floats hold values of any size: powers of two, so that dividing and
// multiplying by them are exact, and rounding to 8 bits is all the error there is.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

// The least power of two, from 2^-126 on, of which T's largest number times it is `most` or more,
// for most >= 0; NaN of infinity. T's largest number is 1.75 times a power of two, so bits say it.
template <class T>
constexpr float float8_scale(float most) {
  constexpr int kLargest = std::is_same_v<T, Float8E4M3> ? 8 : 15;  // 448 and 57344
  const auto bits = std::bit_cast<std::uint32_t>(most);
  if (bits >= 0x7f800000u) return std::bit_cast<float>(0x7fc00000u);
  const int exponent =
      static_cast<int>(bits >> 23) + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0) - kLargest;
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent < 1 ? 1 : exponent) << 23);
}
// 1 / scale.
constexpr float inverse_of_scale(float scale) {
  constexpr std::uint32_t kOne = 0x3f800000u;
  return scale != scale ? scale
                        : std::bit_cast<float>(2 * kOne - std::bit_cast<std::uint32_t>(scale));
}
static_assert(inverse_of_scale(0x1p-126f) == 0x1p126f && inverse_of_scale(8) == 0.125f);
static_assert(float8_scale<Float8E4M3>(448) == 1 && float8_scale<Float8E4M3>(448.00003f) == 2);
static_assert(float8_scale<Float8E5M2>(57344) == 1 && float8_scale<Float8E5M2>(57345) == 2);
static_assert(float8_scale<Float8E4M3>(0) == 0x1p-126f &&
              float8_scale<Float8E4M3>(0x1p127f) == 0x1p119f);

}  // namespace tessera::kernels
