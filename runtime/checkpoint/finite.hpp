// Whether bytes that are to be saved are numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "tessera/base/dtype.hpp"

namespace tessera::checkpoint {

// Whether there is no infinity and no NaN: their exponent has all its bits.
template <class Bits>
inline bool are_finite(std::span<const std::byte> values, Bits exponent) {
  for (std::size_t at = 0; at < values.size(); at += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, values.data() + at, sizeof bits);
    if ((bits & exponent) == exponent) return false;
  }
  return true;
}
inline bool are_finite(std::span<const std::byte> values, DType dtype) {
  if (dtype == f64) return are_finite<std::uint64_t>(values, 0x7ff0'0000'0000'0000);
  if (dtype == f32) return are_finite<std::uint32_t>(values, 0x7f80'0000);
  if (dtype == bf16) return are_finite<std::uint16_t>(values, 0x7f80);
  if (dtype == e4m3) return are_finite<std::uint8_t>(values, 0x7f);
  if (dtype == e5m2) return are_finite<std::uint8_t>(values, 0x7c);
  return dtype != f16 || are_finite<std::uint16_t>(values, 0x7c00);
}

}  // namespace tessera::checkpoint
