// Each layer against its formula in f64 on the host, and its gradients against slopes.
#include <algorithm>

#include "tessera/nn/attention.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/nn/mlp.hpp"
#include "tessera/nn/norm.hpp"
#include "tests/nn/helpers.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// y = x W^T + b in f64: x [rows, in], W [out, in].
std::vector<double> affine(const std::vector<double>& x, const std::vector<float>& w,
                           const std::vector<float>& b, std::size_t in, std::size_t out) {
  std::vector<double> y(x.size() / in * out);
  for (std::size_t r = 0; r < x.size() / in; ++r)
    for (std::size_t o = 0; o < out; ++o) {
      double sum = b.empty() ? 0 : b[o];
      for (std::size_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
  return y;
}
std::vector<double> widen(const std::vector<float>& v) { return {v.begin(), v.end()}; }

// Every value within `relative` of the largest one: sums of n products of order 1 in f32 differ
// from f64 by some sqrt(n) roundings of 6e-8.
void check_close(const Tensor& y, const std::vector<double>& expected, double relative) {
  const std::vector<float> got = y.to_vector<float>();
  REQUIRE(got.size() == expected.size());
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    largest = std::max(largest, std::abs(expected[i]));
    worst = std::max(worst, std::abs(got[i] - expected[i]));
  }
  INFO("worst " << worst << " of " << largest);
  CHECK(worst <= relative * largest);
}

// softmax(q k^T / sqrt(D)) v over s <= t for q [B, T, H D], k and v [B, T, K D], in f64; q and k
// are rotated by theta first unless it is 0.
struct HostAttention {
  std::size_t B, T, H, K, D;
  double theta = 0;

  std::vector<double> rotated(std::vector<double> x, std::size_t heads) const {
    for (std::size_t row = 0; row < B * T * heads; ++row)
      for (std::size_t i = 0; i < D / 2; ++i) {
        const double angle =
            static_cast<double>(row / heads % T) *
            std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(D));
        double &a = x[row * D + i], &b = x[row * D + i + D / 2];
        const double rotated_a = a * std::cos(angle) - b * std::sin(angle);
        b = b * std::cos(angle) + a * std::sin(angle);
        a = rotated_a;
      }
    return x;
  }
  std::vector<double> operator()(std::vector<double> q, std::vector<double> k,
                                 const std::vector<double>& v) const {
    if (theta > 0) q = rotated(std::move(q), H), k = rotated(std::move(k), K);
    std::vector<double> out(q.size());
    for (std::size_t b = 0; b < B; ++b)
      for (std::size_t t = 0; t < T; ++t)
        for (std::size_t h = 0; h < H; ++h) {
          const std::size_t at = ((b * T + t) * H + h) * D, g = h / (H / K);
          double total = 0;
          std::vector<double> sum(D);
          for (std::size_t s = 0; s <= t; ++s) {
            const std::size_t other = ((b * T + s) * K + g) * D;
            double score = 0;
            for (std::size_t d = 0; d < D; ++d) score += q[at + d] * k[other + d];
            const double p = std::exp(score / std::sqrt(static_cast<double>(D)));
            total += p;
            for (std::size_t d = 0; d < D; ++d) sum[d] += p * v[other + d];
          }
          for (std::size_t d = 0; d < D; ++d) out[at + d] = sum[d] / total;
        }
    return out;
  }
};

}  // namespace

TEST_CASE("Linear multiplies by its weight and adds its bias", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  for (const bool with_bias : {true, false}) {
    nn::Linear layer(7, 5, {.bias = with_bias}, draw.device);
    CHECK(layer.bias.defined() == with_bias);
    CHECK(layer.named_parameters().size() == (with_bias ? 2u : 1u));
    randomize(layer, draw);
    const std::vector<float> x = draw.normal(2 * 3 * 7);
    const Tensor y = layer(Tensor::from(x, {2, 3, 7}, draw.device));
    CHECK(y.shape() == Shape{2, 3, 5});
    check_close(y,
                affine(widen(x), values(layer.weight),
                       with_bias ? values(layer.bias) : std::vector<float>{}, 7, 5),
                1e-6);
    check_slope(layer, [&](const Tensor& t) { return layer(t); }, x, {2, 3, 7}, draw);
    CHECK_THROWS_AS(layer(draw.tensor({2, 6})), ContractError);
    CHECK_THROWS_AS(layer(Tensor::zeros({2, 7}, f64, draw.device)), ContractError);
  }
  CHECK_THROWS_AS(nn::Linear(0, 3), ContractError);
}

TEST_CASE("a layer on meta has shapes and no memory; using it says so", "[nn]") {
  Draw draw;
  nn::Linear layer(4, 3);
  CHECK(layer.weight.shape() == Shape{3, 4});
  try {
    layer(draw.tensor({2, 4}));
    FAIL("a layer without memory was used");
  } catch (const ContractError& e) {
    CHECK(std::string(e.what()).find("materialize") != std::string::npos);
  }
  layer.materialize(draw.device);
  CHECK(layer(draw.tensor({2, 4})).shape() == Shape{2, 3});
  CHECK_THROWS_AS(layer.materialize(Device::meta()), ContractError);
}

TEST_CASE("Embedding picks rows, and its gradient adds up where they were picked", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  nn::Embedding layer(11, 6, draw.device);
  randomize(layer, draw);
  const std::vector<std::int32_t> ids = draw.ids(20, 11);
  const Tensor y = layer(Tensor::from(ids, {4, 5}, draw.device));
  REQUIRE(y.shape() == Shape{4, 5, 6});
  const std::vector<float> w = values(layer.weight), got = y.to_vector<float>();
  std::vector<float> counts(11 * 6);
  for (std::size_t i = 0; i < ids.size(); ++i)
    for (std::size_t c = 0; c < 6; ++c) {
      const std::size_t row = static_cast<std::size_t>(ids[i]) * 6 + c;
      CHECK(got[i * 6 + c] == w[row]);
      counts[row] += 1;
    }
  y.backward(Tensor::ones(y.shape(), f32, draw.device));
  CHECK(layer.weight.grad().to_vector<float>() == counts);
}

TEST_CASE("RMSNorm and LayerNorm follow their formulas", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const std::size_t rows = 6, dim = 33;
  const double eps = 1e-3;
  const std::vector<float> x = draw.normal(rows * dim, 2);
  const Shape shape{2, 3, static_cast<std::int64_t>(dim)};
  nn::RMSNorm rms(dim, eps, draw.device);
  nn::LayerNorm layer(dim, eps, draw.device);
  randomize(rms, draw);
  randomize(layer, draw);
  std::vector<double> y_rms(x.size()), y_layer(x.size());
  const std::vector<float> w_rms = values(rms.weight), w = values(layer.weight),
                           b = values(layer.bias);
  for (std::size_t r = 0; r < rows; ++r) {
    double mean = 0, squares = 0;
    for (std::size_t i = 0; i < dim; ++i) {
      mean += x[r * dim + i] / static_cast<double>(dim);
      squares += static_cast<double>(x[r * dim + i]) * x[r * dim + i] / static_cast<double>(dim);
    }
    for (std::size_t i = 0; i < dim; ++i) {
      y_rms[r * dim + i] = x[r * dim + i] / std::sqrt(squares + eps) * w_rms[i];
      y_layer[r * dim + i] =
          (x[r * dim + i] - mean) / std::sqrt(squares - mean * mean + eps) * w[i] + b[i];
    }
  }
  check_close(rms(Tensor::from(x, shape, draw.device)), y_rms, 1e-6);
  check_close(layer(Tensor::from(x, shape, draw.device)), y_layer, 1e-6);
  check_slope(rms, [&](const Tensor& t) { return rms(t); }, x, shape, draw);
  check_slope(layer, [&](const Tensor& t) { return layer(t); }, x, shape, draw);
}

TEST_CASE("grouped-query attention with rotary positions follows its formula", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const HostAttention host{2, 7, 4, 2, 6, 100};
  const std::size_t C = 10, HD = host.H * host.D, KD = host.K * host.D;
  nn::GroupedQueryAttention layer({.dim = 10, .n_heads = 4, .n_kv_heads = 2, .head_dim = 6},
                                  std::make_shared<nn::Rotary>(9, 6, 100.0), draw.device);
  CHECK(layer.k_proj.weight.shape() == Shape{12, 10});
  randomize(layer, draw);
  const std::vector<float> x = draw.normal(2 * 7 * 10);
  const Tensor y = layer(Tensor::from(x, {2, 7, 10}, draw.device));
  REQUIRE(y.shape() == Shape{2, 7, 10});
  const auto project = [&](nn::Linear& p, std::size_t out) {
    return affine(widen(x), values(p.weight), {}, C, out);
  };
  const auto heads =
      host(project(layer.q_proj, HD), project(layer.k_proj, KD), project(layer.v_proj, KD));
  check_close(y, affine(heads, values(layer.o_proj.weight), {}, HD, C), 1e-5);
  check_slope(layer, [&](const Tensor& t) { return layer(t); }, x, {2, 7, 10}, draw);
  CHECK_THROWS_AS(layer(draw.tensor({1, 10, 10})), ContractError);  // more than 9 positions
  CHECK_THROWS_AS(layer(draw.tensor({7, 10})), ContractError);
}

TEST_CASE("fused attention follows its formula", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const HostAttention host{2, 5, 3, 3, 4, 0};
  const std::size_t C = 12;
  nn::FusedAttention layer(12, 3, draw.device);
  randomize(layer, draw);
  const std::vector<float> x = draw.normal(2 * 5 * 12);
  const auto qkv =
      affine(widen(x), values(layer.c_attn.weight), values(layer.c_attn.bias), C, 3 * C);
  std::array<std::vector<double>, 3> part;
  for (std::size_t i = 0; i < qkv.size(); ++i) part[i / C % 3].push_back(qkv[i]);
  check_close(layer(Tensor::from(x, {2, 5, 12}, draw.device)),
              affine(host(part[0], part[1], part[2]), values(layer.c_proj.weight),
                     values(layer.c_proj.bias), C, C),
              1e-5);
  check_slope(layer, [&](const Tensor& t) { return layer(t); }, x, {2, 5, 12}, draw);
}

TEST_CASE("attention refuses heads that do not divide", "[nn]") {
  CHECK_THROWS_AS(nn::FusedAttention(10, 3), ContractError);
  CHECK_THROWS_AS(nn::GroupedQueryAttention({.dim = 12, .n_heads = 3, .n_kv_heads = 2}, nullptr),
                  ContractError);
  CHECK_THROWS_AS(nn::Rotary(8, 5, 10000.0), ContractError);
}

TEST_CASE("the two MLPs follow their formulas", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const std::vector<float> x = draw.normal(6 * 5);
  nn::SwigluMlp gated(5, 9, draw.device);
  nn::GeluMlp plain(5, 9, draw.device);
  randomize(gated, draw);
  randomize(plain, draw);
  std::vector<double> gate = affine(widen(x), values(gated.gate_proj.weight), {}, 5, 9);
  const auto up = affine(widen(x), values(gated.up_proj.weight), {}, 5, 9);
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
  auto hidden = affine(widen(x), values(plain.c_fc.weight), values(plain.c_fc.bias), 5, 9);
  for (double& h : hidden)
    h = 0.5 * h * (1 + std::tanh(std::sqrt(2 / M_PI) * (h + 0.044715 * h * h * h)));
  check_close(gated(Tensor::from(x, {6, 5}, draw.device)),
              affine(gate, values(gated.down_proj.weight), {}, 9, 5), 2e-6);
  check_close(plain(Tensor::from(x, {6, 5}, draw.device)),
              affine(hidden, values(plain.c_proj.weight), values(plain.c_proj.bias), 9, 5), 2e-6);
  check_slope(gated, [&](const Tensor& t) { return gated(t); }, x, {6, 5}, draw);
  check_slope(plain, [&](const Tensor& t) { return plain(t); }, x, {6, 5}, draw);
}
