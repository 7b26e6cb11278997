// scaled_dot_product_attention: its two ways are one function, in values and gradients. PyTorch's
// values are compared in tests/parity.
#include <algorithm>
#include <cmath>

#include "tessera/memory/memory.hpp"
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::check_gradients;
using tessera::testing::Draw;

namespace {

Tensor boolean_of(const std::vector<double>& values, const Shape& shape, const Device& device) {
  return raw::cast(Tensor::from(values, shape, device), boolean);
}
double largest_difference(const Tensor& a, const Tensor& b) {
  const Tensor d = raw::abs(raw::binary(raw::Binary::sub, raw::cast(a, f64), raw::cast(b, f64)));
  return d.numel() == 0 ? 0 : raw::reduce_all(raw::Reduction::max, d).item();
}

}  // namespace

TEST_CASE("derivatives of scaled dot-product attention") {
  Draw draw;
  INFO("seed " << draw.seed);
  const auto with = [](const ScaledDotProductOptions& options) {
    return [options](const std::vector<Tensor>& v) {
      return scaled_dot_product_attention(v[0], v[1], v[2], options);
    };
  };
  const auto inputs = [&](std::int64_t length, std::int64_t keys, std::int64_t width) {
    return std::vector{draw.normal({2, 4, length, 3}), draw.normal({2, 2, keys, 3}),
                       draw.normal({2, 2, keys, width})};
  };
  // A query without keys is among those of the mask.
  const Tensor mask = boolean_of({1, 0, 1, 0, 0, 0, 0, 1, 1}, {3, 3}, draw.device);
  const ScaledDotProductOptions all[] = {{},
                                         {.is_causal = true},
                                         {.is_causal = true, .scale = -0.7},
                                         {.mask = mask},
                                         {.mask = mask, .is_causal = true},
                                         {.dropout = 0.4, .dropout_key = 5, .dropout_offset = 2}};
  for (const ScaledDotProductOptions& options : all) {
    check_gradients(with(options), inputs(3, 3, 3));
    check_gradients(with(options), inputs(3, 3, 2));  // the way with all scores
  }
  check_gradients(with({.is_causal = true}), inputs(2, 4, 3));
  check_gradients(with({.is_causal = true}), inputs(4, 2, 3));
  for (const Shape& bias :
       {Shape{4, 3, 2}, Shape{2, 1, 3, 1}, Shape{2}, Shape{}, Shape{2, 4, 3, 2}}) {
    std::vector<Tensor> with_bias = inputs(3, 2, 2);
    with_bias.push_back(draw.normal(bias));
    check_gradients(
        [](const auto& v) {
          return scaled_dot_product_attention(v[0], v[1], v[2],
                                              {.bias = v[3], .is_causal = true, .scale = 0.5});
        },
        with_bias);
  }
  // Transposed, sliced and broadcast operands.
  for (const bool causal : {false, true})
    check_gradients(
        [causal](const auto& v) {
          return scaled_dot_product_attention(transpose(v[0], 1, 2), slice(v[1], 2, 1, 4),
                                              expand(v[2], {2, 2, 3, 3}), {.is_causal = causal});
        },
        {draw.normal({2, 3, 2, 3}), draw.normal({2, 2, 5, 3}), draw.normal({2, 1, 3, 3})});
}

TEST_CASE("attention of no element") {
  Draw draw;
  const auto f = [](const std::vector<Tensor>& v) {
    return scaled_dot_product_attention(v[0], v[1], v[2], {.is_causal = true});
  };
  check_gradients(
      f, {draw.normal({0, 2, 3, 2}), draw.normal({0, 2, 3, 2}), draw.normal({0, 2, 3, 2})});
  check_gradients(
      f, {draw.normal({1, 2, 0, 2}), draw.normal({1, 2, 3, 2}), draw.normal({1, 2, 3, 2})});
  check_gradients(
      f, {draw.normal({1, 0, 3, 2}), draw.normal({1, 2, 3, 2}), draw.normal({1, 2, 3, 2})});
  check_gradients(
      f, {draw.normal({1, 2, 3, 2}), draw.normal({1, 2, 3, 2}), draw.normal({1, 2, 3, 0})});
  const auto no_keys = [](const std::vector<Tensor>& v) {
    return scaled_dot_product_attention(v[0], v[1], v[2], {.bias = v[3]});
  };
  const std::vector<Tensor> inputs{draw.normal({1, 2, 3, 2}), draw.normal({1, 2, 0, 2}),
                                   draw.normal({1, 2, 0, 2}), draw.normal({1})};
  check_gradients(no_keys, inputs);
  const std::vector<double> zeros(12, 0.0);
  CHECK(no_keys(inputs).to_vector<double>() == zeros);
}

TEST_CASE("the kernel and the way with all scores agree, in every dtype and any head width") {
  // One row of 2 S exponentials, products of E and of S terms: a few roundings more than the
  // longest sum on either side, of values below 2; a 16-bit result is rounded once more.
  Draw draw;
  INFO("seed " << draw.seed);
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const std::int64_t width : {8, 256, 300})
      for (const bool causal : {false, true}) {
        const auto make = [&](std::int64_t heads) {
          return raw::cast(raw::mul(draw.normal({2, heads, 5, width}), 0.3), dtype);
        };
        const Tensor q = make(4), k = make(2), v = make(2);
        const Tensor full = boolean_of(std::vector(25, 1.0), {5, 5}, draw.device);
        const Tensor fused = scaled_dot_product_attention(q, k, v, {.is_causal = causal});
        const Tensor scores =
            scaled_dot_product_attention(q, k, v, {.mask = full, .is_causal = causal});
        const double rounding = dtype == bf16 ? 0x1p-7 : dtype == f16 ? 0x1p-10 : 0;
        INFO(dtype << ", width " << width);
        CHECK(fused.dtype() == dtype);
        // f64: the kernel's scale is f32.
        CHECK(largest_difference(fused, scores) <= 300 * 0x1p-23 + 2 * rounding);
      }
  const Tensor x = draw.normal({2, 5, 2, 4});
  const Tensor y = causal_attention(x, x, x), h = transpose(x, 1, 2);
  CHECK(largest_difference(
            transpose(scaled_dot_product_attention(h, h, h, {.is_causal = true}), 1, 2), y) == 0);
}

TEST_CASE("the kernel runs where it can, and makes no scores") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::zeros({1, 2, 512, 8}, f32, device);
  Ledger& ledger = Memory::of(device).ledger();
  const auto peak_of = [&](const ScaledDotProductOptions& options) {
    ledger.reset_peak();
    const std::int64_t before = ledger.live_bytes();
    scaled_dot_product_attention(x, x, x, options);
    return ledger.peak_bytes() - before;
  };
  const std::int64_t score_bytes = std::int64_t{2} * 512 * 512 * 4;
  CHECK(peak_of({}) < score_bytes / 4);
  CHECK(peak_of({.is_causal = true, .scale = 0.1}) < score_bytes / 4);
  const std::int64_t masked = peak_of({.mask = Tensor::ones({512}, boolean, device)});
  CHECK(masked > score_bytes);
  CHECK(masked < 2 * score_bytes + score_bytes / 4);
}

TEST_CASE("queries without keys give zeros, and a broken value shows only where it is used") {
  const Device device = tessera::testing::any_device();
  const Tensor x = Tensor::ones({1, 1, 2, 2}, f32, device);
  const Tensor mask = boolean_of({1, 1, 0, 0}, {2, 2}, device);
  CHECK(scaled_dot_product_attention(x, x, x, {.mask = mask}).to_vector<float>() ==
        std::vector<float>{1, 1, 0, 0});
  const float none = -std::numeric_limits<float>::infinity();
  const Tensor bias = Tensor::from({none, none, 0, none}, {2, 2}, device);
  CHECK(scaled_dot_product_attention(x, x, x, {.bias = bias}).to_vector<float>() ==
        std::vector<float>{0, 0, 1, 1});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Tensor broken = Tensor::from({nan, 0, 1, 1}, {1, 1, 2, 2}, device);
  const std::vector<float> out =
      scaled_dot_product_attention(broken, x, x, {.mask = mask}).to_vector<float>();
  CHECK((std::isnan(out[0]) && out[2] == 0));
}

TEST_CASE("dropout in attention has dropout's draws") {
  Draw draw;
  const Tensor q = draw.normal({1, 2, 3, 2}), k = draw.normal({1, 2, 5, 2}),
               v = draw.normal({1, 2, 5, 2});
  const Tensor scores = softmax(matmul(q, transpose(k, 2, 3)) * (1 / std::sqrt(2.0)));
  const Tensor expected = matmul(dropout(scores, 0.5, 7, 3), v);
  const Tensor got = scaled_dot_product_attention(
      q, k, v, {.dropout = 0.5, .dropout_key = 7, .dropout_offset = 3});
  CHECK(largest_difference(got, expected) < 1e-14);
  CHECK(largest_difference(scaled_dot_product_attention(q, k, v, {.dropout = 1}),
                           Tensor::zeros({1, 2, 3, 2}, f64, draw.device)) == 0);
}

TEST_CASE("ranks that are told nothing drop other weights of attention, forward and backward") {
  const auto gradient_of = [](const Device& device, std::optional<std::int64_t> offset) {
    const Tensor q = Tensor::zeros({2, 2, 6, 2}, f32, device);
    Tensor v = Tensor::ones({2, 2, 6, 2}, f32, device).require_grad();
    const Tensor y = scaled_dot_product_attention(
        q, q, v, {.dropout = 0.5, .dropout_key = 7, .dropout_offset = offset});
    autograd::random_state().first_row = 5;  // of what comes between forward and backward
    y.backward(Tensor::ones(y.shape(), f32, device));
    autograd::random_state().first_row.reset();
    auto both = y.to_vector<float>();
    for (const float g : v.grad().to_vector<float>()) both.push_back(g);
    return both;
  };
  const Device second = Device::cpu({.rank = 1});
  CHECK(gradient_of(second, {}) != gradient_of(Device::cpu(), {}));
  CHECK(gradient_of(second, {}) == gradient_of(second, 2 * 2 * 6 * 6 / 4));
}

TEST_CASE("attention on meta has shapes alone") {
  const Device meta = Device::meta();
  const auto empty = [&](const Shape& shape) { return Tensor::empty(shape, bf16, meta); };
  const Tensor q = empty({2, 4, 3, 8});
  CHECK(scaled_dot_product_attention(q, empty({2, 2, 3, 8}), empty({2, 2, 3, 8})).shape() ==
        Shape{2, 4, 3, 8});
  const Tensor y = scaled_dot_product_attention(
      q, empty({2, 2, 7, 8}), empty({2, 2, 7, 5}),
      {.mask = Tensor::empty({3, 7}, boolean, meta), .bias = empty({7}), .is_causal = true});
  CHECK(y.shape() == Shape{2, 4, 3, 5});
  CHECK(y.dtype() == bf16);
}

TEST_CASE("attention refuses what does not fit, by name") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const auto zeros = [&](const Shape& shape, DType dtype = f32) {
    return Tensor::zeros(shape, dtype, device);
  };
  const Tensor q = zeros({2, 4, 3, 8}), k = zeros({2, 2, 5, 8});
  const auto refuses = [&](const Tensor& a, const Tensor& b, const Tensor& c,
                           const ScaledDotProductOptions& options, const std::string& part) {
    CHECK_THROWS_WITH(scaled_dot_product_attention(a, b, c, options),
                      Catch::Matchers::StartsWith("scaled_dot_product_attention: ") &&
                          Catch::Matchers::Contains(part));
  };
  refuses(zeros({4, 3, 8}), k, k, {}, "q is [4, 3, 8]");
  refuses(zeros({2, 3, 3, 8}), k, k, {}, "Hkv dividing H");
  refuses(q, k, zeros({2, 2, 4, 8}), {}, "v [2, 2, 4, 8]");
  refuses(q, k, zeros({2, 2, 5, 8}, f64), {}, "v f64");
  refuses(zeros({2, 4, 3, 8}, i32), k, k, {}, "one floating dtype");
  refuses(q, k, k, {.mask = zeros({3, 5})}, "mask is [3, 5] of f32");
  refuses(q, k, k, {.mask = zeros({3, 4}, boolean)}, "mask is [3, 4] of bool");
  refuses(q, k, k, {.bias = zeros({3, 2, 4, 3, 5})}, "bias is");
  refuses(q, k, k, {.bias = zeros({5}, f64)},
          "of f64, expected what broadcasts to [2, 4, 3, 5] of f32");
  refuses(q, k, k, {.dropout = 1.5}, "dropout is 1.5");
}
