// Attention, softmax and losses as tests/golden/make_functions.py computes them with PyTorch: the
// same inputs by the same formula, in f64, values and gradients.
//
// Tolerance. The file holds 10 decimals, so it is off by 5e-11; sin() and the arithmetic round to
// about 1e-15 of values up to 40. The fused kernel takes its scale in f32, which is off by up to
// 2^-24 of it: where it runs, scores of at most 2 move by 1.2e-7, and what comes of them by a few
// times that, up to 1e-6.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/autograd/ops.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using nlohmann::json;

namespace {

const Device& host() {
  static const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  return device;
}

// sin(number + 0.7 i).
Tensor wave(int number, const Shape& shape) {
  std::vector<double> values(static_cast<std::size_t>(shape.numel()));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = std::sin(number + 0.7 * static_cast<double>(i));
  return Tensor::from(values, shape, host());
}
Tensor numbers(const std::vector<double>& values, const Shape& shape) {
  return Tensor::from(values, shape, host());
}
Tensor classes(const std::vector<std::int64_t>& values, const Shape& shape) {
  return Tensor::from(values, shape, host());
}

class Golden {
 public:
  Golden() {
    std::ifstream file(std::string(GOLDEN_FOLDER) + "/functions.json");
    REQUIRE(file);
    cases_ = json::parse(file);
  }
  using Function = std::function<Tensor(const std::vector<Tensor>&)>;
  void check(const std::string& name, std::vector<Tensor> inputs, const Function& f,
             double tolerance = 1e-9) {
    INFO(name);
    REQUIRE(cases_.contains(name));
    seen_.insert(name);
    for (Tensor& x : inputs) x = x.detach().require_grad();
    const Tensor y = f(inputs);
    std::vector<double> gradient(static_cast<std::size_t>(y.numel()));
    for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i] = std::cos(i);
    y.backward(numbers(gradient, y.shape()));
    const json& theirs = cases_[name];
    REQUIRE(theirs.size() == inputs.size() + 1);
    compare(y, theirs[0], tolerance);
    for (std::size_t i = 0; i < inputs.size(); ++i)
      compare(inputs[i].grad(), theirs[i + 1], tolerance);
  }
  // Whether every case of the file has been checked that begins so.
  void expect_all(const std::string& prefix) const {
    for (const auto& [name, theirs] : cases_.items())
      if (name.starts_with(prefix) && !seen_.contains(name)) FAIL_CHECK(name << " is not computed");
  }

 private:
  static void compare(const Tensor& ours, const json& theirs, double tolerance) {
    const std::vector<double> values = raw::contiguous(ours).to_vector<double>();
    REQUIRE(values.size() == theirs.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double other =
          theirs[i].is_string() ? std::stod(theirs[i].get<std::string>()) : theirs[i].get<double>();
      const bool same = values[i] == other || (std::isnan(values[i]) && std::isnan(other)) ||
                        std::abs(values[i] - other) <= tolerance * std::max(1.0, std::abs(other));
      INFO("element " << i << ": " << values[i] << ", PyTorch has " << other);
      CHECK(same);
    }
  }

  json cases_;
  std::set<std::string> seen_;
};

}  // namespace

TEST_CASE("attention has PyTorch's values and gradients") {
  Golden golden;
  const Tensor q = wave(1, {2, 4, 3, 2}), k = wave(2, {2, 2, 5, 2}), v = wave(3, {2, 2, 5, 3});
  const auto with = [](const ScaledDotProductOptions& options) {
    return [options](const std::vector<Tensor>& x) {
      return scaled_dot_product_attention(x[0], x[1], x[2], options);
    };
  };
  golden.check("attention grouped", {q, k, v}, with({}));
  golden.check("attention causal top left", {q, k, v}, with({.is_causal = true, .scale = 0.3}));
  const std::vector<double> mask{1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1};
  golden.check("attention masked", {q, k, v},
               with({.mask = raw::cast(numbers(mask, {3, 5}), boolean)}));
  golden.check("attention biased", {q, k, v, wave(4, {4, 1, 5})}, [](const auto& x) {
    return scaled_dot_product_attention(x[0], x[1], x[2], {.bias = x[3]});
  });
  const Tensor q1 = wave(1, {1, 2, 4, 2}), k1 = wave(2, {1, 2, 4, 2}), v1 = wave(3, {1, 2, 4, 2});
  golden.check("attention fused", {q1, k1, v1}, with({.scale = 0.25}), 1e-6);
  golden.check("attention fused causal", {q1, k1, v1}, with({.is_causal = true}), 1e-6);
  golden.expect_all("attention");
}

TEST_CASE("softmax and its logarithm have PyTorch's values and gradients over every dimension") {
  Golden golden;
  for (const int dim : {0, 1, 2}) {
    golden.check(concat("softmax ", dim), {wave(1, {2, 3, 2})},
                 [dim](const auto& x) { return softmax(x[0], dim); });
    golden.check(concat("log_softmax ", dim), {wave(1, {2, 3, 2})},
                 [dim](const auto& x) { return log_softmax(x[0], dim - 3); });
  }
  golden.expect_all("softmax");
  golden.expect_all("log_softmax");
}

TEST_CASE("losses have PyTorch's values and gradients") {
  Golden golden;
  const Tensor logits = wave(1, {4, 3}), targets = classes({2, 1, 0, 1}, {4});
  const Tensor images = wave(2, {2, 3, 2}), pixels = classes({0, 2, 1, 1}, {2, 2});
  const Tensor weight = numbers({0.5, 1.5, 2.0}, {3});
  const Tensor x = raw::mul(wave(1, {2, 3}), 2), t = wave(2, {2, 3});
  const Tensor steep = raw::mul(x, 20),
               scale = raw::binary(raw::Binary::add, raw::mul(wave(3, {2, 3}), 0.5), 1);
  const Tensor p = raw::binary(raw::Binary::add, raw::mul(wave(1, {2, 3}), 0.4), 0.5);
  const Tensor u = raw::binary(raw::Binary::add, raw::mul(wave(2, {2, 3}), 0.5), 0.5);
  using enum LossReduction;
  for (const auto& [name, reduction] : {std::pair("mean", mean), {"sum", sum}, {"none", none}}) {
    const LossReduction r = reduction;
    for (const double smoothing : {0.0, 0.2})
      for (const bool weighted : {false, true}) {
        const ClassLossOptions options{.weight = weighted ? weight : Tensor(),
                                       .ignore_index = 1,
                                       .reduction = r,
                                       .label_smoothing = smoothing};
        const std::string rest =
            concat(name, smoothing > 0 ? " 0.2 " : " 0.0 ", weighted ? "weighted" : "plain");
        golden.check("cross_entropy " + rest, {logits},
                     [&](const auto& v) { return cross_entropy(v[0], targets, options); });
        golden.check("cross_entropy images " + rest, {images},
                     [&](const auto& v) { return cross_entropy(v[0], pixels, options); });
      }
    const ClassLossOptions weighted{.weight = weight, .ignore_index = 1, .reduction = r};
    golden.check(concat("nll_loss ", name), {logits},
                 [&](const auto& v) { return nll_loss(v[0], targets, weighted); });
    golden.check(concat("nll_loss images ", name), {images},
                 [&](const auto& v) { return nll_loss(v[0], pixels, {.reduction = r}); });
    golden.check(concat("mse_loss ", name), {x, t},
                 [&](const auto& v) { return mse_loss(v[0], v[1], {r}); });
    golden.check(concat("l1_loss ", name), {x, t},
                 [&](const auto& v) { return l1_loss(v[0], v[1], {r}); });
    golden.check(concat("huber_loss ", name), {x, t},
                 [&](const auto& v) { return huber_loss(v[0], v[1], {0.6, r}); });
    golden.check(concat("smooth_l1_loss ", name), {x, t},
                 [&](const auto& v) { return smooth_l1_loss(v[0], v[1], {0.6, r}); });
    golden.check(concat("binary_cross_entropy ", name), {p, u}, [&](const auto& v) {
      return binary_cross_entropy(v[0], v[1], {.weight = scale, .reduction = r});
    });
    golden.check(concat("binary_cross_entropy_with_logits ", name), {steep, u}, [&](const auto& v) {
      return binary_cross_entropy_with_logits(
          v[0], v[1], {.weight = scale, .pos_weight = weight, .reduction = r});
    });
    golden.check(concat("kl_div ", name), {x, u},
                 [&](const auto& v) { return kl_div(v[0], v[1], {.reduction = r}); });
    golden.check(concat("kl_div log ", name), {x, t}, [&](const auto& v) {
      return kl_div(v[0], v[1], {.reduction = r, .log_target = true});
    });
  }
  golden.check("kl_div batchmean", {x, u},
               [&](const auto& v) { return kl_div(v[0], v[1], {.reduction = batchmean}); });
  golden.check("cross_entropy all ignored", {logits}, [](const auto& v) {
    return cross_entropy(v[0], classes({-100, -100, -100, -100}, {4}), ClassLossOptions{});
  });
  golden.check(
      "binary_cross_entropy at the ends",
      {numbers({0, 1, 0, 1}, {4}), numbers({0.25, 0.25, 0, 1}, {4})},
      [](const auto& v) { return binary_cross_entropy(v[0], v[1], {.reduction = none}); },
      1e-8);  // PyTorch's bound on the divisor, 1e-12, is an f32
  for (const char* prefix :
       {"cross_entropy", "nll", "mse", "l1", "huber", "smooth", "binary", "kl"})
    golden.expect_all(prefix);
}
