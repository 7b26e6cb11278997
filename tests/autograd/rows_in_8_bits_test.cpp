// Rows in 8 bits: what is encoded and decoded, and products of it, with their derivatives. Beside
// PyTorch: tests/parity/rows_in_8_bits_golden_test.
#include "tessera/autograd/rows_in_8_bits.hpp"

#include <algorithm>
#include <cmath>

#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using Catch::Contains;
using testing::fresh_seed;

namespace {

std::vector<float> floats_of(const Tensor& x) {
  return raw::contiguous(raw::cast(x, f32)).to_vector<float>();
}

}  // namespace

TEST_CASE("rows in 8 bits are within a rounding, and what was decoded is encoded to the same") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Device device = Device::cpu();
  const Tensor x = Tensor::normal({9, 37}, 0, 0.02, seed, f32, device);
  const auto [codes, scales] = encode_rows(x);
  CHECK(codes.shape() == Shape{9, 37});
  CHECK(scales.shape() == Shape{9, 1});
  const std::vector<float> values = floats_of(x), back = floats_of(decode_rows(codes, scales, f32)),
                           each = floats_of(scales);
  for (std::size_t row = 0; row < 9; ++row)
    for (std::size_t i = row * 37; i < (row + 1) * 37; ++i)
      CHECK(std::abs(values[i] - back[i]) <=
            std::max(0x1p-4f * std::abs(values[i]), 0x1p-10f * each[row]));
  for (const DType dtype : {f32, bf16}) {  // both have all of its numbers
    const Tensor decoded = decode_rows(codes, scales, dtype);
    CHECK(decoded.dtype() == dtype);
    CHECK(floats_of(decoded) == back);
    const RowsIn8Bits again = encode_rows(decoded);
    CHECK(floats_of(decode_rows(again.codes, again.scales, f32)) == back);
  }
  const RowsIn8Bits none = encode_rows(Tensor::zeros({3, 0}, f32, device));
  CHECK(none.scales.shape() == Shape{3, 1});
  CHECK(encode_rows(Tensor::zeros({0, 4}, f32, device)).codes.shape() == Shape{0, 4});
  CHECK(floats_of(decode_rows(encode_rows(Tensor::zeros({2, 4}, f32, device)).codes,
                              Tensor::ones({2, 1}, f32, device), f32)) == std::vector<float>(8, 0));
}

TEST_CASE("a product of rows in 8 bits has the bits of one of their values, and so its backward") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Device device = Device::cpu();
  for (const DType dtype : {f32, bf16})
    for (const bool recomputes : {false, true}) {
      INFO(concat(dtype) << ", recomputed " << recomputes);
      const auto [codes, scales] = encode_rows(Tensor::normal({6, 16}, 0, 0.3, seed, f32, device));
      const Tensor w = decode_rows(codes, scales, dtype);
      struct Found {
        std::vector<float> y, dx, db;
      };
      const auto run = [&, codes = codes, scales = scales](bool encoded) {
        Tensor x = raw::cast(Tensor::normal({2, 3, 16}, 0, 1, seed + 1, f32, device), dtype),
               bias = raw::cast(Tensor::normal({6}, 0, 1, seed + 2, f32, device), dtype);
        x.require_grad();
        bias.require_grad();
        const auto layer = [&](const Tensor& in) {
          return encoded ? linear_in_8_bits(in, codes, scales, bias) : linear(in, w, bias);
        };
        const Tensor y = recomputes ? recompute(layer, x) : layer(x);
        y.backward(raw::cast(Tensor::normal({2, 3, 6}, 0, 1, seed + 3, f32, device), dtype));
        return Found{floats_of(y), floats_of(x.grad()), floats_of(bias.grad())};
      };
      const Found own = run(true), plain = run(false);
      CHECK(own.y == plain.y);
      CHECK(own.dx == plain.dx);
      CHECK(own.db == plain.db);
    }
}

TEST_CASE("what are no rows in 8 bits is refused") {
  const Device device = Device::cpu();
  const auto [codes, scales] = encode_rows(Tensor::ones({4, 8}, f32, device));
  const Tensor x = Tensor::ones({2, 8}, f32, device);
  CHECK_THROWS_WITH(encode_rows(Tensor::ones({4}, f32, device)),
                    Contains("two dimensions or more"));
  CHECK_THROWS_WITH(encode_rows(Tensor::ones({4, 2}, f64, device)), Contains("of f64"));
  CHECK_THROWS_WITH(decode_rows(x, scales, f32), Contains("codes are [2, 8] of f32"));
  CHECK_THROWS_WITH(decode_rows(codes, scales, f64), Contains("values in f64"));
  CHECK_THROWS_WITH(linear_in_8_bits(x, codes, Tensor::ones({4}, f32, device), {}),
                    Contains("scales [4] of f32"));
  CHECK_THROWS_WITH(linear_in_8_bits(Tensor::ones({2, 7}, f32, device), codes, scales, {}),
                    Contains("x is [2, 7]"));
  CHECK_THROWS_WITH(linear_in_8_bits(x, codes, scales, Tensor::ones({5}, f32, device)),
                    Contains("bias is [5]"));
}
