// The floats of 16 and of 8 bits against their definitions: every one of them widened, and floats
// narrowed as rounding to nearest even says.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <type_traits>

#include "tessera/base/dtype.hpp"
#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The value of a binary format with `mantissa` bits and exponents from `low` to `high`, read off
// its definition.
double decoded(std::uint16_t bits, int mantissa, int low, int high) {
  const double sign = bits & 0x8000u ? -1 : 1;
  const int exponent = (bits & 0x7fff) >> mantissa, fraction = bits & ((1 << mantissa) - 1);
  if (exponent == 0) return sign * std::ldexp(fraction, low - mantissa);
  if (exponent == high - low + 2)
    return fraction ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  return sign * std::ldexp((1 << mantissa) + fraction, exponent - 1 + low - mantissa);
}

// `x` rounded to the nearest value of that format, ties to even, in double precision: a float
// divided by a power of two is exact there, and so is its rounding to an integer of at most 12
// bits.
double rounded(float x, int mantissa, int low, int high) {
  if (!std::isfinite(x) || x == 0) return x;
  const double quantum = std::ldexp(1.0, std::max(std::ilogb(x), low) - mantissa);
  const double value = std::nearbyint(double{x} / quantum) * quantum;
  const double largest = std::ldexp(2.0 - std::ldexp(1.0, -mantissa), high);
  return std::abs(value) > largest ? std::copysign(double{kInfinity}, value) : value;
}

// Of an 8-bit float, whose exponents begin at `low`. e4m3 has no infinity, and one NaN.
double decoded_8(std::uint8_t bits, int mantissa, int low) {
  const double sign = bits & 0x80 ? -1 : 1;
  const int exponent = (bits & 0x7f) >> mantissa, fraction = bits & ((1 << mantissa) - 1);
  if (mantissa == 3 ? (bits & 0x7f) == 0x7f : (exponent == 31 && fraction != 0))
    return std::numeric_limits<double>::quiet_NaN();
  if (mantissa == 2 && exponent == 31) return sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(fraction, low - mantissa);
  return sign * std::ldexp((1 << mantissa) + fraction, exponent - 1 + low - mantissa);
}

double rounded_e5m2(float x) { return rounded(x, 2, -14, 15); }
double rounded_e4m3(float x) {
  const double value = rounded(x, 3, -6, 126);  // of which 448 is the largest
  return std::abs(value) > 448 ? std::copysign(448, value) : value;
}
double rounded_f16(float x) { return rounded(x, 10, -14, 15); }
double rounded_bf16(float x) { return rounded(x, 7, -126, 127); }

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

}  // namespace

TEST_CASE("every 16-bit pattern widens to the value it encodes, and narrows back to itself") {
  for (std::uint32_t bits = 0; bits <= 0xffffu; ++bits) {
    Float16 half;
    half.bits = static_cast<std::uint16_t>(bits);
    BFloat16 brain;
    brain.bits = static_cast<std::uint16_t>(bits);
    INFO("bits " << bits);
    REQUIRE(same(float{half}, decoded(half.bits, 10, -14, 15)));
    REQUIRE(same(float{brain}, decoded(brain.bits, 7, -126, 127)));
    if (std::isnan(float{half}))
      REQUIRE(std::isnan(float{Float16(float{half})}));
    else
      REQUIRE(Float16(float{half}).bits == half.bits);
    if (std::isnan(float{brain}))
      REQUIRE(std::isnan(float{BFloat16(float{brain})}));
    else
      REQUIRE(BFloat16(float{brain}).bits == brain.bits);
  }
}

TEST_CASE("floats narrow to the nearest value, ties to even") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 500000; ++i) {
    // All patterns alike, and then those whose exponent float16 has, subnormals and overflow
    // included.
    auto bits = static_cast<std::uint32_t>(rng());
    if (i % 2) bits = (bits & 0x807fffffu) | ((100u + bits % 46u) << 23);
    if (i % 8 == 1) bits &= 0xfffff000u;  // ties of float16
    if (i % 8 == 2) bits &= 0xffff8000u;  // ties of bfloat16
    const auto x = std::bit_cast<float>(bits);
    INFO("bits " << bits);
    REQUIRE(same(float{Float16(x)}, rounded_f16(x)));
    REQUIRE(same(float{BFloat16(x)}, rounded_bf16(x)));
  }
}

TEST_CASE("every 8-bit pattern widens to the value it encodes, and narrows back to itself") {
  for (int code = 0; code < 256; ++code) {
    Float8E4M3 a;
    Float8E5M2 b;
    a.bits = b.bits = static_cast<std::uint8_t>(code);
    INFO("code " << code);
    REQUIRE(same(float{a}, decoded_8(a.bits, 3, -6)));
    REQUIRE(same(float{b}, decoded_8(b.bits, 2, -14)));
    if (!std::isnan(float{a})) REQUIRE(Float8E4M3(float{a}).bits == a.bits);
    if (!std::isnan(float{b})) REQUIRE(Float8E5M2(float{b}).bits == b.bits);
  }
}

TEST_CASE("floats narrow to the nearest of 8 bits, ties to even") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 500000; ++i) {
    auto bits = static_cast<std::uint32_t>(rng());
    if (i % 4) bits = (bits & 0x807fffffu) | ((105u + bits % 46u) << 23);  // subnormals to overflow
    if (i % 8 == 1) bits &= 0xfff80000u;                                   // ties of e4m3
    if (i % 8 == 2) bits &= 0xfff00000u;                                   // ties of e5m2
    const auto x = std::bit_cast<float>(bits);
    INFO("bits " << bits);
    REQUIRE(same(float{Float8E4M3(x)}, std::isnan(x) ? x : rounded_e4m3(x)));
    REQUIRE(same(float{Float8E5M2(x)}, rounded_e5m2(x)));
  }
}

TEST_CASE("the edges of the 8-bit floats") {
  CHECK(float{Float8E4M3(kInfinity)} == 448);
  CHECK(float{Float8E4M3(-464.0f)} == -448);
  CHECK(Float8E4M3(0x1p-10f).bits == 0);  // half the smallest subnormal: to even, zero
  CHECK(Float8E4M3(std::nextafter(0x1p-10f, 1.0f)).bits == 1);
  CHECK(Float8E4M3(-0.0f).bits == 0x80);
  CHECK(Float8E4M3(std::numeric_limits<float>::quiet_NaN()).bits == 0x7f);
  CHECK(float{Float8E5M2(61439.996f)} == 57344);  // just below the middle to 2^16
  CHECK(float{Float8E5M2(61440.0f)} == kInfinity);
  CHECK(Float8E5M2(-kInfinity).bits == 0xfc);
  CHECK(Float8E5M2(0x1p-17f).bits == 0);
  CHECK(std::isnan(float{Float8E5M2(std::bit_cast<float>(0x7f800001u))}));
}

TEST_CASE("the edges of the 16-bit floats") {
  CHECK(float{Float16(65504.0f)} == 65504.0f);    // the largest float16
  CHECK(float{Float16(65519.996f)} == 65504.0f);  // just below the middle to 2^16
  CHECK(float{Float16(65520.0f)} == kInfinity);
  CHECK(Float16(-65520.0f).bits == 0xfc00);
  CHECK(Float16(0x1p-25f).bits == 0);  // half the smallest subnormal: to even, zero
  CHECK(Float16(std::nextafter(0x1p-25f, 1.0f)).bits == 1);  // more than half
  CHECK(Float16(-0.0f).bits == 0x8000);
  CHECK(Float16(0x1.ff8p-15f).bits == 0x03ff);  // the largest subnormal
  CHECK(Float16(0x1.ffcp-15f).bits == 0x0400);  // half way to the smallest normal number: to even
  CHECK(BFloat16(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(BFloat16(-kInfinity).bits == 0xff80);
  CHECK(std::isnan(
      float{BFloat16(std::bit_cast<float>(0x7f800001u))}));  // its upper half alone is infinity
  CHECK(std::isnan(
      float{BFloat16(std::bit_cast<float>(0xffffffffu))}));  // rounding up would wrap to zero
  CHECK(std::isnan(float{Float16(std::bit_cast<float>(0x7f800001u))}));
}

TEST_CASE("visit, dtype_of, size and name agree for every dtype") {
  const struct {
    DType dtype;
    std::size_t bytes;
    std::string_view name;
    bool floating;
  } table[] = {{f32, 4, "f32", true},       {bf16, 2, "bf16", true}, {f16, 2, "f16", true},
               {f64, 8, "f64", true},       {i32, 4, "i32", false},  {i64, 8, "i64", false},
               {boolean, 1, "bool", false}, {e4m3, 1, "e4m3", true}, {e5m2, 1, "e5m2", true},
               {u8, 1, "u8", false}};
  for (const auto& row : table) {
    CHECK(visit(row.dtype, [](auto tag) { return dtype_of<typename decltype(tag)::type>(); }) ==
          row.dtype);
    CHECK(size_bytes(row.dtype) == row.bytes);
    CHECK(name(row.dtype) == row.name);
    CHECK(is_floating(row.dtype) == row.floating);
    CHECK(concat(row.dtype) == row.name);
  }
}
