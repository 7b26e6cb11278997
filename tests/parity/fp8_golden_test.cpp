// The 8-bit floats against PyTorch's: every code, and what floats become, from f32 and from the
// 16-bit floats that hold the same. Bits are equal, but for those of a NaN.
#include <bit>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/tensor/ops.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using nlohmann::json;

namespace {

json golden() { return json::parse(std::ifstream(GOLDEN_FOLDER "/fp8.json")); }

template <class T>
std::vector<std::uint8_t> codes_of(const Tensor& x) {
  std::vector<std::uint8_t> out(static_cast<std::size_t>(x.numel()));
  x.to_bytes(std::as_writable_bytes(std::span(out)));
  for (std::uint8_t& code : out) {
    T value;
    value.bits = code;
    if (std::isnan(float{value})) code = 0x7f;
  }
  return out;
}

double number(const json& value) {
  return value.is_number() ? value.get<double>() : std::stod(value.get<std::string>());
}

}  // namespace

TEMPLATE_TEST_CASE("8-bit floats hold and become what they do in PyTorch", "", Float8E4M3,
                   Float8E5M2) {
  constexpr DType dtype = dtype_of<TestType>();
  const json file = golden();
  const Device device = Device::cpu();

  std::vector<std::uint8_t> all(256);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint8_t>(i);
  const Tensor stored = Tensor::from_bytes(std::as_bytes(std::span(all)), {256}, dtype, device);
  const json& codes = file["codes"][std::string(name(dtype))];
  for (const DType wide : {f32, bf16, f16, f64}) {
    const std::vector<double> values = raw::cast(raw::cast(stored, wide), f64).to_vector<double>();
    for (std::size_t i = 0; i < 256; ++i) {
      INFO("code " << i << " in " << wide);
      const double expected = number(codes[i]);
      if (std::isnan(expected))
        CHECK(std::isnan(values[i]));
      else
        CHECK((values[i] == expected && std::signbit(values[i]) == std::signbit(expected)));
    }
  }

  std::vector<float> from;
  std::vector<std::uint8_t> expected;
  for (const json& row : file["casts"]) {
    from.push_back(std::bit_cast<float>(row[0].get<std::uint32_t>()));
    expected.push_back(row[dtype == e4m3 ? 1 : 2].get<std::uint8_t>());
    if (std::isnan(from.back())) expected.back() = 0x7f;
  }
  REQUIRE(from.size() > 1000);
  const Tensor wide = Tensor::from(from, {static_cast<std::int64_t>(from.size())}, device);
  const std::vector<std::uint8_t> got = codes_of<TestType>(raw::cast(wide, dtype));
  for (std::size_t i = 0; i < from.size(); ++i) {
    INFO(from[i]);
    CHECK(int{got[i]} == int{expected[i]});
  }
  CHECK(codes_of<TestType>(raw::cast(raw::cast(wide, f64), dtype)) == got);
  for (const DType half : {bf16, f16}) {  // a middle of two codes is exact in both
    const Tensor narrow = raw::cast(wide, half);
    CHECK(codes_of<TestType>(raw::cast(narrow, dtype)) ==
          codes_of<TestType>(raw::cast(raw::cast(narrow, f32), dtype)));
  }
}
