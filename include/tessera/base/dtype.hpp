// Element types: the enum that crosses borders, the two 16-bit floats, and `visit`, which turns one
// into the other. Conversions round to nearest even, as IEEE 754 does; NaN stays NaN.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <ostream>
#include <string_view>
#include <type_traits>

namespace tessera {

enum class DType : std::uint8_t { f32, bf16, f16, f64, i32, i64, boolean };

inline constexpr DType f32 = DType::f32, bf16 = DType::bf16, f16 = DType::f16, f64 = DType::f64,
                       i32 = DType::i32, i64 = DType::i64, boolean = DType::boolean;

// The upper half of an IEEE binary32.
struct BFloat16 {
  std::uint16_t bits = 0;

  BFloat16() = default;
  constexpr explicit BFloat16(float value) : bits(round(std::bit_cast<std::uint32_t>(value))) {}
  constexpr operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

 private:
  static constexpr std::uint16_t round(std::uint32_t u) {
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
    return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
};

// IEEE binary16.
struct Float16 {
  std::uint16_t bits = 0;

  Float16() = default;
  constexpr explicit Float16(float value) : bits(narrow(std::bit_cast<std::uint32_t>(value))) {}
  constexpr operator float() const { return widen(bits); }

 private:
  static constexpr std::uint16_t narrow(std::uint32_t u) {
    const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
    const std::uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;   // NaN
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
    if (magnitude < 0x38800000u) {                        // subnormal or zero
      const std::uint32_t shift = 126u - (magnitude >> 23);
      if (shift > 24u) return sign;
      const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
      const std::uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1u);
      const std::uint32_t half = 1u << (shift - 1u);
      return static_cast<std::uint16_t>(sign + kept +
                                        (rest > half || (rest == half && (kept & 1u))));
    }
    const std::uint32_t rebased = magnitude - 0x38000000u;
    return static_cast<std::uint16_t>(sign + ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
  }
  static constexpr float widen(std::uint16_t h) {
    const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
    const std::uint32_t exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
    if (exponent == 0) {
      const float value = static_cast<float>(mantissa) * 0x1p-24f;
      return sign ? -value : value;
    }
    const std::uint32_t e = exponent == 31 ? 255u : exponent + 112u;
    return std::bit_cast<float>(sign | (e << 23) | (mantissa << 13));
  }
};

static_assert(sizeof(BFloat16) == 2 && sizeof(Float16) == 2);
static_assert(BFloat16(1.0f).bits == 0x3f80 && BFloat16(1.00390625f).bits == 0x3f80);
static_assert(Float16(1.0f).bits == 0x3c00 && Float16(65520.0f).bits == 0x7c00);
static_assert(Float16(0x1p-24f).bits == 1 && float(Float16(0x1p-24f)) == 0x1p-24f);

template <class T>
struct TypeTag {
  using type = T;
};

// Calls f(TypeTag<T>{}) with the C++ type of `dtype`:
//
//   visit(dtype, [](auto tag) { using T = typename decltype(tag)::type; ... });
template <class F>
constexpr decltype(auto) visit(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(TypeTag<float>{});
    case DType::bf16:
      return f(TypeTag<BFloat16>{});
    case DType::f16:
      return f(TypeTag<Float16>{});
    case DType::f64:
      return f(TypeTag<double>{});
    case DType::i32:
      return f(TypeTag<std::int32_t>{});
    case DType::i64:
      return f(TypeTag<std::int64_t>{});
    case DType::boolean:
      break;
  }
  return f(TypeTag<bool>{});
}

// Of one element.
constexpr std::size_t size_bytes(DType dtype) {
  return visit(dtype, [](auto tag) { return sizeof(typename decltype(tag)::type); });
}

constexpr bool is_floating(DType d) {
  return d == DType::f32 || d == DType::bf16 || d == DType::f16 || d == DType::f64;
}

// "f32", "bf16", "f16", "f64", "i32", "i64", "bool"; a value that is none of the enumerators is
// "unknown".
constexpr std::string_view name(DType d) {
  constexpr std::string_view names[] = {"f32", "bf16", "f16", "f64", "i32", "i64", "bool"};
  const auto i = static_cast<std::size_t>(d);
  return i < std::size(names) ? names[i] : "unknown";
}

// The DType of a C++ type; of another type it does not compile.
template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>)
    return DType::f32;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return DType::bf16;
  else if constexpr (std::is_same_v<T, Float16>)
    return DType::f16;
  else if constexpr (std::is_same_v<T, double>)
    return DType::f64;
  else if constexpr (std::is_same_v<T, std::int32_t>)
    return DType::i32;
  else if constexpr (std::is_same_v<T, std::int64_t>)
    return DType::i64;
  else {
    static_assert(std::is_same_v<T, bool>, "no DType for this type");
    return DType::boolean;
  }
}

inline std::ostream& operator<<(std::ostream& out, DType d) { return out << name(d); }

}  // namespace tessera
