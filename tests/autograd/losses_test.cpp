// Derivatives of softmax and losses, their dtypes, edges and refusals. PyTorch's values are
// compared in tests/parity.
#include <cmath>
#include <functional>
#include <limits>

#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::check_gradients;
using tessera::testing::Draw;
using tessera::testing::layouts;

namespace {

using Loss = std::function<Tensor(const Tensor& x, const Tensor& target, LossReduction reduction)>;

// Losses of two tensors, and whether x and target must be probabilities.
struct Named {
  std::string name;
  Loss f;
  bool of_probabilities = false;
};
std::vector<Named> losses_of_elements() {
  return {
      {"mse_loss", [](const auto& x, const auto& t, auto r) { return mse_loss(x, t, {r}); }},
      {"l1_loss", [](const auto& x, const auto& t, auto r) { return l1_loss(x, t, {r}); }},
      {"huber_loss",
       [](const auto& x, const auto& t, auto r) { return huber_loss(x, t, {0.7, r}); }},
      {"smooth_l1_loss",
       [](const auto& x, const auto& t, auto r) { return smooth_l1_loss(x, t, {0.7, r}); }},
      {"binary_cross_entropy",
       [](const auto& x, const auto& t, auto r) {
         return binary_cross_entropy(x, t, {.reduction = r});
       },
       true},
      {"binary_cross_entropy_with_logits",
       [](const auto& x, const auto& t, auto r) {
         return binary_cross_entropy_with_logits(x, t, {.reduction = r});
       }},
      {"kl_div",
       [](const auto& x, const auto& t, auto r) { return kl_div(x, t, {.reduction = r}); }, true}};
}
constexpr LossReduction kReductions[] = {LossReduction::none, LossReduction::mean,
                                         LossReduction::sum};

Tensor classes(const std::vector<std::int32_t>& values, const Shape& shape, const Device& device) {
  return Tensor::from(values, shape, device);
}

}  // namespace

TEST_CASE("derivatives of softmax and its logarithm over any dimension") {
  Draw draw;
  INFO("seed " << draw.seed);
  for (const int dim : {0, 1, 2, -2}) {
    check_gradients([dim](const auto& v) { return softmax(v[0], dim); }, {draw.normal({3, 2, 4})});
    check_gradients([dim](const auto& v) { return log_softmax(transpose(v[0], 0, 2), dim); },
                    {draw.normal({3, 2, 4})});
  }
  for (const Shape& shape : {Shape{0, 3}, Shape{3, 0}, Shape{1}, Shape{}}) {
    check_gradients([](const auto& v) { return softmax(v[0], 0); }, {draw.normal(shape)});
    check_gradients([](const auto& v) { return log_softmax(v[0], 0); }, {draw.normal(shape)});
  }
  CHECK(softmax(Tensor::zeros({}, f32, draw.device)).item() == 1);
  CHECK(log_softmax(Tensor::zeros({}, f32, draw.device), 0).item() == 0);
  CHECK_THROWS_AS(softmax(Tensor::zeros({}, f32, draw.device), 1), ContractError);
  CHECK_THROWS_WITH(log_softmax(Tensor::zeros({2}, i32, draw.device)),
                    "log_softmax: needs a floating tensor, got [2] of i32");
}

TEST_CASE("log_softmax keeps what the logarithm of a softmax loses") {
  const Device device = tessera::testing::any_device();
  const Tensor x = Tensor::from({1000, 0, -1000}, {3}, device);
  CHECK(log_softmax(x).to_vector<float>() == std::vector<float>{0, -1000, -2000});
  const Tensor half = log_softmax(cast(x, bf16));
  CHECK(half.dtype() == bf16);
  CHECK(raw::cast(half, f32).to_vector<float>() == std::vector<float>{0, -1000, -2000});
  const float none = -std::numeric_limits<float>::infinity();
  CHECK(log_softmax(Tensor::from({0, none}, {2}, device)).to_vector<float>() ==
        std::vector<float>{0, none});
  CHECK(std::isnan(log_softmax(Tensor::from({none, none}, {2}, device)).to_vector<float>()[0]));
}

TEST_CASE("derivatives of losses of elements, for inputs and targets in any layout") {
  Draw draw;
  for (const Named& loss : losses_of_elements())
    for (const LossReduction reduction : kReductions)
      for (const auto& layout : layouts()) {
        if (layout.name == "no element" && reduction == LossReduction::mean) continue;  // NaN
        INFO(loss.name << ", " << layout.name << ", seed " << draw.seed);
        const Tensor x = loss.of_probabilities ? draw.uniform(layout.shape, 0.2, 0.4)
                                               : draw.uniform(layout.shape, 0.5, 0.6);
        const Tensor near = draw.uniform(layout.shape, 0.15, 0.3);
        // Differences are between 0.2 and 0.45 or near 2: no kink of Huber's is near.
        const Tensor target = loss.of_probabilities
                                  ? draw.uniform(layout.shape, 0.6, 0.8)
                                  : raw::where(near < Tensor::full({}, 0.22, f64, draw.device),
                                               raw::binary(raw::Binary::sub, near, 1.5), near);
        check_gradients(
            [&](const auto& v) { return loss.f(layout.view(v[0]), layout.view(v[1]), reduction); },
            {x, target});
      }
  const Tensor x = draw.normal({4, 3}), t = draw.uniform({4, 3}, 0.1, 0.9);
  INFO("seed " << draw.seed);
  const Tensor weight = draw.uniform({4, 1}, 0.5, 2), positive = draw.uniform({3}, 0.5, 2);
  check_gradients(
      [&](const auto& v) {
        return binary_cross_entropy_with_logits(v[0], v[1],
                                                {.weight = weight, .pos_weight = positive});
      },
      {x, t});
  check_gradients(
      [&](const auto& v) { return binary_cross_entropy(v[0], v[1], {.weight = weight}); },
      {draw.uniform({4, 3}, 0.1, 0.9), t});
  for (const bool log : {false, true})
    check_gradients(
        [&](const auto& v) {
          return kl_div(v[0], v[1], {.reduction = LossReduction::batchmean, .log_target = log});
        },
        {x, t});
}

TEST_CASE("derivatives of losses of classes") {
  Draw draw;
  INFO("seed " << draw.seed);
  struct Case {
    Shape logits, targets;
  };
  const Tensor weight = draw.uniform({3}, 0.5, 2);
  for (const auto& [shape, target_shape] :
       {Case{{4, 3}, {4}}, Case{{3}, {}}, Case{{2, 3, 2}, {2, 2}}, Case{{2, 3, 2, 2}, {2, 2, 2}},
        Case{{0, 3}, {0}}})
    for (const LossReduction reduction : kReductions)
      for (const bool weighted : {false, true})
        for (const double smoothing : {0.0, 0.3}) {
          if (shape.numel() == 0 && reduction == LossReduction::mean) continue;  // NaN
          const Tensor targets = draw.indices(target_shape, 3, shape.ndim() == 2 ? i64 : i32);
          const ClassLossOptions options{.weight = weighted ? weight : Tensor(),
                                         .ignore_index = shape.ndim() == 1 ? -100 : 1,
                                         .reduction = reduction,
                                         .label_smoothing = smoothing};
          // A batch whose targets are all ignored has no mean.
          const Tensor first = Tensor::arange(targets.numel(), i64, draw.device) ==
                               Tensor::zeros({}, i64, draw.device);
          const Tensor some =
              raw::where(raw::reshape(first, target_shape),
                         Tensor::zeros(target_shape, targets.dtype(), draw.device), targets);
          INFO("logits " << shape << (weighted ? ", weighted" : "") << ", smoothing " << smoothing);
          const Tensor logits = draw.normal(shape);
          check_gradients([&](const auto& v) { return cross_entropy(v[0], some, options); },
                          {logits});
          if (smoothing == 0)
            check_gradients([&](const auto& v) { return nll_loss(v[0], some, options); }, {logits});
        }
  const Tensor targets = draw.indices({2, 4}, 3, i32);
  check_gradients(
      [&](const auto& v) {
        return cross_entropy(transpose(v[0], 1, 2), raw::transpose(targets, 0, 1),
                             {.label_smoothing = 0.1});
      },
      {draw.normal({4, 2, 3})});
}

TEST_CASE("cross_entropy with options that change nothing is the fused one") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor targets = draw.indices({6}, 5, i64);
  for (const DType dtype : {f32, f64, bf16, f16}) {
    const Tensor x = raw::cast(draw.normal({6, 5}), dtype);
    Tensor a = x.detach(), b = raw::mul(x, 1);
    a.require_grad(), b.require_grad();
    const Tensor plain = cross_entropy(a, targets),
                 general = cross_entropy(b, targets, {.weight = {}});
    CHECK(plain.dtype() == general.dtype());
    // A mean is a sum over a count: two roundings in place of one.
    CHECK(std::abs(plain.item() - general.item()) <=
          4 * std::abs(plain.item()) * (dtype == f64 ? 0x1p-53 : 0x1p-24));
    plain.backward();
    general.backward();
    const Tensor d = raw::abs(raw::binary(raw::Binary::sub, a.grad(), b.grad()));
    CHECK(raw::cast(raw::reduce_all(raw::Reduction::max, d), f64).item() <=
          (dtype == f64   ? 0x1p-52
           : dtype == f32 ? 0x1p-23
           : dtype == f16 ? 0x1p-11
                          : 0x1p-8));
  }
}

TEST_CASE("ignored rows may hold anything, and an invalid target shows") {
  const Device device = tessera::testing::any_device();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Tensor x = Tensor::from({nan, nan, 0, 0}, {2, 2}, device).require_grad();
  const Tensor loss = cross_entropy(x, classes({-100, 1}, {2}, device), {.label_smoothing = 0.5});
  CHECK(std::abs(loss.item() - std::log(2)) < 1e-6);
  loss.backward();
  const std::vector<float> g = x.grad().to_vector<float>();
  CHECK((g[0] == 0 && g[1] == 0 && std::abs(g[2] - 0.25) < 1e-6));
  const ClassLossOptions none{.reduction = LossReduction::none};
  const Tensor y = Tensor::zeros({3, 2}, f32, device);
  for (const auto& f : {&nll_loss, static_cast<decltype(&nll_loss)>(&cross_entropy)}) {
    const std::vector<float> out =
        f(y, classes({2, 0, -1}, {3}, device), none, Caller::current()).to_vector<float>();
    CHECK((std::isnan(out[0]) && !std::isnan(out[1]) && std::isnan(out[2])));
  }
}

TEST_CASE("the mean of no loss is NaN, its sum 0") {
  const Device device = tessera::testing::any_device();
  const Tensor x = Tensor::zeros({0, 3}, f32, device);
  for (const Named& loss : losses_of_elements()) {
    INFO(loss.name);
    CHECK(std::isnan(loss.f(x, x, LossReduction::mean).item()));
    CHECK(loss.f(x, x, LossReduction::sum).item() == 0);
    CHECK(loss.f(x, x, LossReduction::none).shape() == Shape{0, 3});
  }
  CHECK(std::isnan(cross_entropy(x, classes({}, {0}, device), ClassLossOptions{}).item()));
  CHECK(nll_loss(x, classes({}, {0}, device), {.reduction = LossReduction::sum}).item() == 0);
}

TEST_CASE("16-bit inputs lose nothing between the steps of a loss") {
  const Device device = tessera::testing::any_device();
  Tensor x = raw::cast(Tensor::from({-30, 30, 8}, {3}, device), bf16).require_grad();
  const Tensor t = raw::cast(Tensor::from({0, 1, 1}, {3}, device), bf16);
  const Tensor loss = binary_cross_entropy_with_logits(x, t, {.reduction = LossReduction::none});
  CHECK(loss.dtype() == f32);
  const std::vector<float> out = loss.to_vector<float>();
  CHECK(std::abs(out[0] / std::exp(-30.0) - 1) < 1e-5);  // log1p, not log(1 + e) = 0
  CHECK(std::abs(out[1] / std::exp(-30.0) - 1) < 1e-5);
  CHECK(std::abs(out[2] / std::log1p(std::exp(-8.0)) - 1) < 1e-5);
  sum(loss).backward();
  CHECK(x.grad().dtype() == bf16);
}

TEST_CASE("losses on meta have shapes alone") {
  const Device meta = Device::meta();
  const Tensor x = Tensor::empty({2, 3, 4}, bf16, meta).require_grad();
  for (const Named& loss : losses_of_elements())
    CHECK(loss.f(x, Tensor::empty({2, 3, 4}, bf16, meta), LossReduction::none).shape() ==
          Shape{2, 3, 4});
  const Tensor targets = Tensor::empty({2, 4}, i64, meta);
  const Tensor loss = cross_entropy(x, targets, {.label_smoothing = 0.1});
  CHECK(loss.shape() == Shape{});
  CHECK(loss.dtype() == f32);
  loss.backward();
  CHECK(x.grad().shape() == x.shape());
  CHECK(nll_loss(x, targets, {.reduction = LossReduction::none}).shape() == Shape{2, 4});
}

TEST_CASE("losses refuse what does not fit, by name") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::zeros({2, 3}, f32, device);
  for (const Named& loss : losses_of_elements()) {
    const auto starts = Catch::Matchers::StartsWith(loss.name + ": ");
    CHECK_THROWS_WITH(loss.f(x, Tensor::zeros({3}, f32, device), LossReduction::mean), starts);
    CHECK_THROWS_WITH(loss.f(x, Tensor::zeros({2, 3}, f64, device), LossReduction::mean), starts);
    if (loss.name != "kl_div")
      CHECK_THROWS_WITH(loss.f(x, x, LossReduction::batchmean),
                        starts && Catch::Matchers::Contains("only kl_div takes"));
  }
  using Catch::Matchers::Contains;
  CHECK_THROWS_WITH(huber_loss(x, x, {0}), "huber_loss: delta is 0, expected above 0");
  CHECK_THROWS_WITH(smooth_l1_loss(x, x, {-1}), "smooth_l1_loss: beta is -1, expected at least 0");
  CHECK_THROWS_WITH(binary_cross_entropy(x, x, {.pos_weight = x}), Contains("pos_weight"));
  CHECK_THROWS_WITH(
      binary_cross_entropy_with_logits(x, x, {.weight = Tensor::zeros({2}, f32, device)}),
      Contains("weight is [2] of f32, expected what broadcasts to [2, 3]"));
  const Tensor targets = classes({0, 1}, {2}, device);
  CHECK_THROWS_WITH(cross_entropy(x, x, {.weight = {}}), Contains("targets are [2, 3] of f32"));
  CHECK_THROWS_WITH(cross_entropy(x, targets, {.weight = x}), Contains("weight is [2, 3]"));
  CHECK_THROWS_WITH(cross_entropy(x, targets, {.label_smoothing = 2}),
                    "cross_entropy: label_smoothing is 2, expected 0 to 1");
  CHECK_THROWS_WITH(cross_entropy(x, targets, {.ignore_index = std::int64_t{1} << 40}),
                    Contains("ignore_index"));
  CHECK_THROWS_WITH(nll_loss(x, targets, {.label_smoothing = 0.1}),
                    "nll_loss: only cross_entropy takes label_smoothing; leave it out");
}
