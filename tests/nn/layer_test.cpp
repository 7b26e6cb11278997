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

// A number in f64 and how far f32 may be from it, by the standard model of rounding: an operation
// is off by kUnit of its result, a function by four of them. A formula over it is its own
// derivation of its bound.
struct Near {
  static constexpr double kUnit = 0x1p-24;
  double v = 0, error = 0;

  static Near rounded(double exact, double carried, double times = 1) {
    return {exact, carried + times * kUnit * (std::abs(exact) + carried)};
  }
  friend Near operator+(Near a, Near b) { return rounded(a.v + b.v, a.error + b.error); }
  friend Near operator-(Near a, Near b) { return rounded(a.v - b.v, a.error + b.error); }
  friend Near operator*(Near a, Near b) {
    return rounded(a.v * b.v,
                   std::abs(a.v) * b.error + std::abs(b.v) * a.error + a.error * b.error);
  }
  friend Near operator/(Near a, Near b) {
    const double q = a.v / b.v;
    return rounded(q, (a.error + std::abs(q) * b.error) / (std::abs(b.v) - b.error));
  }
  friend Near sqrt(Near a) { return rounded(std::sqrt(a.v), a.error / std::sqrt(a.v - a.error)); }
  friend Near exp(Near a) { return rounded(std::exp(a.v), std::exp(a.v) * std::expm1(a.error), 4); }
};
Near sigmoid(Near x) { return Near{1, 0} / (Near{1, 0} + exp(Near{-x.v, x.error})); }

// A sum in any order: each of its additions is off by a rounding of all terms' sizes at most.
class Sum {
 public:
  void add(Near term) {
    v_ += term.v;
    error_ += term.error;
    sizes_ += std::abs(term.v) + term.error;
    ++count_;
  }
  operator Near() const { return {v_, error_ + count_ * Near::kUnit * sizes_}; }

 private:
  double v_ = 0, error_ = 0, sizes_ = 0, count_ = 0;
};

std::vector<Near> given(const std::vector<float>& values) {
  std::vector<Near> out;
  for (const float v : values) out.push_back({v, 0});
  return out;
}

// y = x W^T + b: x [rows, in], W [out, in].
std::vector<Near> affine(const std::vector<Near>& x, const std::vector<float>& w,
                         const std::vector<float>& b, std::size_t in, std::size_t out) {
  std::vector<Near> y(x.size() / in * out);
  for (std::size_t r = 0; r < x.size() / in; ++r)
    for (std::size_t o = 0; o < out; ++o) {
      Sum sum;
      if (!b.empty()) sum.add({b[o], 0});
      for (std::size_t i = 0; i < in; ++i) sum.add(x[r * in + i] * Near{w[o * in + i], 0});
      y[r * out + o] = sum;
    }
  return y;
}

void check_near(const Tensor& y, const std::vector<Near>& expected) {
  const std::vector<float> got = y.to_vector<float>();
  REQUIRE(got.size() == expected.size());
  std::size_t worst = 0;
  const auto excess = [&](std::size_t i) {
    return std::abs(got[i] - expected[i].v) - expected[i].error;
  };
  for (std::size_t i = 0; i < got.size(); ++i)
    if (!(excess(i) <= excess(worst))) worst = i;
  INFO("element " << worst << " is " << got[worst] << ", expected " << expected[worst].v
                  << " within " << expected[worst].error);
  CHECK(excess(worst) <= 0);
}

// softmax(q k^T / sqrt(D)) v over s <= t for q [B, T, H D], k and v [B, T, K D]; q and k are
// rotated by theta first unless it is 0.
struct HostAttention {
  std::size_t B, T, H, K, D;
  double theta = 0;

  std::vector<Near> rotated(std::vector<Near> x, std::size_t heads) const {
    for (std::size_t row = 0; row < B * T * heads; ++row)
      for (std::size_t i = 0; i < D / 2; ++i) {
        const double angle =
            static_cast<double>(row / heads % T) *
            std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(D));
        // Tables are f64 rounded to f32.
        const Near cos = Near::rounded(std::cos(angle), 0, 1.01),
                   sin = Near::rounded(std::sin(angle), 0, 1.01);
        Near &a = x[row * D + i], &b = x[row * D + i + D / 2];
        const Near rotated_a = a * cos - b * sin;
        b = b * cos + a * sin;
        a = rotated_a;
      }
    return x;
  }
  std::vector<Near> operator()(std::vector<Near> q, std::vector<Near> k,
                               const std::vector<Near>& v) const {
    if (theta > 0) q = rotated(std::move(q), H), k = rotated(std::move(k), K);
    const Near scale = Near::rounded(1 / std::sqrt(static_cast<double>(D)), 0);
    std::vector<Near> out(q.size());
    for (std::size_t b = 0; b < B; ++b)
      for (std::size_t t = 0; t < T; ++t)
        for (std::size_t h = 0; h < H; ++h) {
          const std::size_t at = ((b * T + t) * H + h) * D, g = h / (H / K);
          const auto row = [&](std::size_t s) { return ((b * T + s) * K + g) * D; };
          std::vector<Near> scores;
          Near top{-INFINITY, 0};
          for (std::size_t s = 0; s <= t; ++s) {
            Sum score;
            for (std::size_t d = 0; d < D; ++d) score.add(q[at + d] * k[row(s) + d]);
            scores.push_back(score * scale);
            top.v = std::max(top.v, scores.back().v);  // whatever is subtracted cancels
          }
          Sum total;
          std::vector<Sum> sums(D);
          for (std::size_t s = 0; s <= t; ++s) {
            const Near p = exp(scores[s] - top);
            total.add(p);
            for (std::size_t d = 0; d < D; ++d) sums[d].add(p * v[row(s) + d]);
          }
          for (std::size_t d = 0; d < D; ++d) out[at + d] = sums[d] * (Near{1, 0} / total);
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
    check_near(y, affine(given(x), values(layer.weight),
                         with_bias ? values(layer.bias) : std::vector<float>{}, 7, 5));
    check_slope(layer, [&](const Tensor& t) { return layer(t); }, x, {2, 3, 7}, draw);
    CHECK_THROWS_AS(layer(draw.tensor({2, 6})), ContractError);
    CHECK_THROWS_AS(layer(Tensor::zeros({2, 7}, f64, draw.device)), ContractError);
  }
  CHECK_THROWS_AS(nn::Linear(0, 3), ContractError);
}

TEST_CASE("a linear layer refuses a bias of another dtype than its input", "[nn]") {
  const Device device = Device::cpu();
  nn::Linear layer(3, 2);
  layer.bias.freeze();
  layer.bias.set_dtype(bf16);
  layer.materialize(device);
  const Tensor x = Tensor::zeros({4, 3}, f32, device);
  const std::string says = ": bias is [2] of bf16, expected [2] of f32";
  CHECK_THROWS_WITH(layer(x), Catch::Matchers::StartsWith("linear" + says));
  CHECK_THROWS_WITH(layer.product.gelu(x), Catch::Matchers::StartsWith("linear_gelu" + says));
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
  std::vector<Near> y_rms(x.size()), y_layer(x.size());
  const std::vector<float> w_rms = values(rms.weight), w = values(layer.weight),
                           b = values(layer.bias);
  for (std::size_t r = 0; r < rows; ++r) {
    const std::size_t at = r * dim;
    const Near count{dim, 0}, one{1, 0}, rounded_eps = Near::rounded(eps, 0);
    Sum sum, squares, variance;
    for (std::size_t i = 0; i < dim; ++i) {
      sum.add({x[at + i], 0});
      squares.add(Near{x[at + i], 0} * Near{x[at + i], 0});
    }
    const Near mean = sum / count;
    const auto centred = [&](std::size_t i) { return Near{x[at + i], 0} - mean; };
    for (std::size_t i = 0; i < dim; ++i) variance.add(centred(i) * centred(i));
    const Near rstd_rms = one / sqrt(squares / count + rounded_eps),
               rstd_layer = one / sqrt(variance / count + rounded_eps);
    for (std::size_t i = 0; i < dim; ++i) {
      y_rms[at + i] = Near{x[at + i], 0} * rstd_rms * Near{w_rms[i], 0};
      y_layer[at + i] = centred(i) * rstd_layer * Near{w[i], 0} + Near{b[i], 0};
    }
  }
  check_near(rms(Tensor::from(x, shape, draw.device)), y_rms);
  check_near(layer(Tensor::from(x, shape, draw.device)), y_layer);
  check_slope(rms, [&](const Tensor& t) { return rms(t); }, x, shape, draw);
  check_slope(layer, [&](const Tensor& t) { return layer(t); }, x, shape, draw);
}

TEST_CASE("zero_grad of a module drops its gradients, and leaves those of others", "[nn]") {
  Draw draw;
  struct Two final : nn::Module {
    explicit Two(const Device& device) {
      register_modules("a", a, "b", b);
      materialize(device);
    }
    nn::Linear a{3, 2}, b{2, 2};
  } two(draw.device);
  const auto backward = [&] { sum(two.b(two.a(draw.tensor({4, 3})))).backward(); };
  backward();
  const std::vector<float> of_b = two.b.bias.grad().to_vector<float>();
  CHECK(of_b == std::vector<float>{4, 4});  // a sum over the rows of ones
  two.a.zero_grad();                        // its group has others too: zeros, which count as none
  CHECK(two.a.bias.grad().to_vector<float>() == std::vector<float>{0, 0});
  CHECK(two.b.bias.grad().to_vector<float>() == of_b);
  two.zero_grad();
  CHECK_FALSE(two.b.bias.grad().defined());
  backward();
  CHECK(two.b.bias.grad().to_vector<float>() == of_b);
  nn::Linear(2, 2).zero_grad();  // without memory there is nothing to drop
}

TEST_CASE("norms without affine parameters have the bits of weights 1 and biases 0", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.tensor({3, 7}), residual = draw.tensor({3, 7}), g = draw.tensor({3, 7});
  const auto check = [&](auto& plain, auto& affine) {
    nn::init(plain, {1});
    nn::init(affine, {1});
    const auto run = [&](auto& norm) {
      Tensor in = mul(x, 1).require_grad();
      const auto [sum, of_sum] = norm.of_sum(in, residual);
      const Tensor y = norm(sum) + of_sum;
      y.backward(g);
      return std::pair(y.template to_vector<float>(), in.grad().template to_vector<float>());
    };
    CHECK(run(plain) == run(affine));
  };
  nn::RMSNorm rms(7, {.elementwise_affine = false}), rms_1(7, 1e-5, draw.device);
  nn::LayerNorm layer(7, {.elementwise_affine = false}), layer_1(7, 1e-5, draw.device);
  check(rms, rms_1);
  check(layer, layer_1);
  CHECK((rms.parameters().empty() && layer.parameters().empty()));
  nn::LayerNorm no_bias(7, {.bias = false}, draw.device);
  check(no_bias, layer_1);
  CHECK(no_bias.named_parameters().size() == 1);
  CHECK_FALSE(no_bias.bias.defined());
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
    return affine(given(x), values(p.weight), {}, C, out);
  };
  const auto heads =
      host(project(layer.q_proj, HD), project(layer.k_proj, KD), project(layer.v_proj, KD));
  check_near(y, affine(heads, values(layer.o_proj.weight), {}, HD, C));
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
      affine(given(x), values(layer.c_attn.weight), values(layer.c_attn.bias), C, 3 * C);
  std::array<std::vector<Near>, 3> part;
  for (std::size_t i = 0; i < qkv.size(); ++i) part[i / C % 3].push_back(qkv[i]);
  check_near(layer(Tensor::from(x, {2, 5, 12}, draw.device)),
             affine(host(part[0], part[1], part[2]), values(layer.c_proj.weight),
                    values(layer.c_proj.bias), C, C));
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
  std::vector<Near> gate = affine(given(x), values(gated.gate_proj.weight), {}, 5, 9);
  const auto up = affine(given(x), values(gated.up_proj.weight), {}, 5, 9);
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] * sigmoid(gate[i]) * up[i];
  auto hidden = affine(given(x), values(plain.c_fc.weight), values(plain.c_fc.bias), 5, 9);
  // h (1 + tanh(z)) / 2 = h sigmoid(2 z), z = sqrt(2 / pi) (h + 0.044715 h^3).
  const Near linear = Near::rounded(2 * std::sqrt(2 / M_PI), 0),
             cubic = Near::rounded(2 * std::sqrt(2 / M_PI) * 0.044715, 0);
  for (Near& h : hidden) h = h * sigmoid(h * (cubic * (h * h) + linear));
  check_near(gated(Tensor::from(x, {6, 5}, draw.device)),
             affine(gate, values(gated.down_proj.weight), {}, 9, 5));
  check_near(plain(Tensor::from(x, {6, 5}, draw.device)),
             affine(hidden, values(plain.c_proj.weight), values(plain.c_proj.bias), 9, 5));
  check_slope(gated, [&](const Tensor& t) { return gated(t); }, x, {6, 5}, draw);
  check_slope(plain, [&](const Tensor& t) { return plain(t); }, x, {6, 5}, draw);
}
