// Element types: the enum that crosses borders, the floats of 16 and of 8 bits, and `visit`, which
// turns an enum into a type. Conversions round to nearest even, as IEEE 754 does; NaN stays NaN.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <ostream>
#include <string_view>
#include <type_traits>

namespace tessera {

enum class DType : std::uint8_t { f32, bf16, f16, f64, i32, i64, boolean, e4m3, e5m2, u8 };

inline constexpr DType f32 = DType::f32, bf16 = DType::bf16, f16 = DType::f16, f64 = DType::f64,
                       i32 = DType::i32, i64 = DType::i64, boolean = DType::boolean,
                       e4m3 = DType::e4m3, e5m2 = DType::e5m2, u8 = DType::u8;

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

// The 8-bit floats, to store values in: a sign, kExponentBits, and the mantissa. With 4 exponent
// bits (e4m3) there is no infinity, and everything beyond the largest value, 448, becomes 448. With
// 5 (e5m2) it becomes infinity. Source: "FP8 Formats for Deep Learning" (Micikevicius and others,
// 2022). PyTorch 2.15: float8_e4m3fn, float8_e5m2.
template <int kExponentBits>
struct Float8 {
  std::uint8_t bits = 0;

  Float8() = default;
  constexpr explicit Float8(float value) : bits(narrow(std::bit_cast<std::uint32_t>(value))) {}
  constexpr operator float() const { return widen(bits); }

 private:
  static constexpr int kMantissaBits = 7 - kExponentBits, kDropped = 23 - kMantissaBits;
  static constexpr std::uint32_t kBias = (1u << (kExponentBits - 1)) - 1;
  static constexpr std::uint32_t kMost = kExponentBits == 4 ? 0x7eu : 0x7cu;  // without the sign
  // 2^23 times the spacing of subnormals. Added to a subnormal, it rounds that to a multiple of the
  // spacing.
  static constexpr float kRounds = kExponentBits == 4 ? 0x1p14f : 0x1p7f;

  // Computes all cases and chooses one, so that a compiler may take several values at once.
  static constexpr std::uint8_t narrow(std::uint32_t u) {
    const std::uint32_t magnitude = u & 0x7fffffffu, rebased = magnitude - ((127u - kBias) << 23);
    const std::uint32_t normal =
        (rebased + ((1u << (kDropped - 1)) - 1) + ((rebased >> kDropped) & 1u)) >> kDropped;
    const std::uint32_t small =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + kRounds) -
        std::bit_cast<std::uint32_t>(kRounds);
    std::uint32_t code = normal < kMost ? normal : kMost;
    code = magnitude < ((128u - kBias) << 23) ? small : code;
    code = magnitude > 0x7f800000u ? 0x7fu : code;  // NaN
    return static_cast<std::uint8_t>(code | ((u >> 24) & 0x80u));
  }
  static constexpr float widen(std::uint32_t code) {
    const std::uint32_t magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
    const float small = static_cast<float>(magnitude) * (kRounds * 0x1p-23f);
    const std::uint32_t normal = (magnitude << kDropped) + ((127u - kBias) << 23);
    std::uint32_t value =
        magnitude < (1u << kMantissaBits) ? std::bit_cast<std::uint32_t>(small) : normal;
    value = magnitude == 0x7cu && kExponentBits == 5 ? 0x7f800000u : value;
    value = magnitude > kMost ? 0x7fc00000u : value;
    return std::bit_cast<float>(value | sign);
  }
};
using Float8E4M3 = Float8<4>;
using Float8E5M2 = Float8<5>;

static_assert(sizeof(Float8E4M3) == 1 && Float8E4M3(1e9f).bits == 0x7e &&
              float(Float8E4M3(448.0f)) == 448 && float(Float8E5M2(57344.0f)) == 57344);
static_assert(Float8E4M3(0x1p-9f).bits == 1 && float(Float8E5M2(0x1p-16f)) == 0x1p-16f);
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
    case DType::e4m3:
      return f(TypeTag<Float8E4M3>{});
    case DType::e5m2:
      return f(TypeTag<Float8E5M2>{});
    case DType::u8:
      return f(TypeTag<std::uint8_t>{});
    case DType::boolean:
      break;
  }
  return f(TypeTag<bool>{});
}

// The bytes of one element.
constexpr std::size_t size_bytes(DType dtype) {
  return visit(dtype, [](auto tag) { return sizeof(typename decltype(tag)::type); });
}

constexpr bool is_float8(DType d) { return d == DType::e4m3 || d == DType::e5m2; }
// Whether it only stores values, which are cast, and no operation computes in it: an 8-bit float,
// or u8, the bytes of images, which are also compared and indexed.
constexpr bool is_storage_only(DType d) { return is_float8(d) || d == DType::u8; }
constexpr bool is_floating(DType d) {
  return d == DType::f32 || d == DType::bf16 || d == DType::f16 || d == DType::f64 || is_float8(d);
}

// "f32", "bf16", "f16", "f64", "i32", "i64", "bool", "e4m3", "e5m2", "u8"; a value that is none of
// the enumerators is "unknown".
constexpr std::string_view name(DType d) {
  constexpr std::string_view names[] = {"f32", "bf16", "f16",  "f64",  "i32",
                                        "i64", "bool", "e4m3", "e5m2", "u8"};
  const auto i = static_cast<std::size_t>(d);
  return i < std::size(names) ? names[i] : "unknown";
}

// The DType of a C++ type. For a type without one it does not compile.
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
  else if constexpr (std::is_same_v<T, Float8E4M3>)
    return DType::e4m3;
  else if constexpr (std::is_same_v<T, Float8E5M2>)
    return DType::e5m2;
  else if constexpr (std::is_same_v<T, std::uint8_t>)
    return DType::u8;
  else {
    static_assert(std::is_same_v<T, bool>, "no DType for this type");
    return DType::boolean;
  }
}

inline std::ostream& operator<<(std::ostream& out, DType d) { return out << name(d); }

}  // namespace tessera
