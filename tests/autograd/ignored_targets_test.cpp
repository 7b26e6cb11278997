// Targets of -100 in the losses that are means over targets: against the same loss of the other
// rows alone.
#include <cmath>
#include <optional>

#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::check_gradients;
using tessera::testing::Draw;

namespace {

using CountedLoss = std::function<Tensor(const Tensor& x, const Tensor& weight,
                                         const Tensor& targets, const TargetCount& count)>;

std::vector<std::pair<std::string, CountedLoss>> counted_losses() {
  std::vector<std::pair<std::string, CountedLoss>> losses = {
      {"whole", [](const Tensor& x, const Tensor& w, const Tensor& t, const TargetCount& count) {
         return detail::cross_entropy(linear(x, w), t, count);
       }}};
  for (const std::int64_t chunk : {1, 4, 100})
    for (const std::optional<double> said : {std::optional<double>(), std::optional<double>(1)})
      losses.emplace_back(
          concat("chunks of ", chunk, said ? ", fast" : ""),
          [=](const Tensor& x, const Tensor& w, const Tensor& t, const TargetCount& count) {
            return linear_cross_entropy(x, w, {}, t, chunk, {.gradient = said, .count = count});
          });
  return losses;
}

struct LossAndGradients {
  double loss;
  std::vector<double> dx, dw;
};
LossAndGradients result_of(const CountedLoss& loss_of, const Tensor& x, const Tensor& weight,
                           const Tensor& targets, const TargetCount& count = {}) {
  const Tensor x_leaf = x.detach().require_grad(), w_leaf = weight.detach().require_grad();
  const Tensor loss = loss_of(x_leaf, w_leaf, targets, count);
  loss.backward();
  return {loss.item(), x_leaf.grad().to_vector<double>(), w_leaf.grad().to_vector<double>()};
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

Tensor targets_from(const std::vector<std::int64_t>& targets, DType dtype, const Device& device) {
  const Tensor t = Tensor::from(targets, {static_cast<std::int64_t>(targets.size())}, device);
  return dtype == i64 ? t : raw::cast(t, dtype);
}

}  // namespace

TEST_CASE("a target of -100 has neither loss nor gradient") {
  Draw draw;
  const DType dtype = GENERATE(i32, i64);
  INFO("targets " << dtype << ", seed " << draw.seed);
  const Tensor x = draw.normal({6, 3}), weight = draw.normal({5, 3}),
               targets = targets_from({3, -100, 0, 4, -100, 1}, dtype, draw.device),
               kept = Tensor::from(std::vector<std::int64_t>{0, 2, 3, 5}, {4}, draw.device),
               kept_targets = targets_from({3, 0, 4, 1}, dtype, draw.device);
  const auto [name, expected_of] = counted_losses()[0];
  const LossAndGradients expected =
      result_of(expected_of, raw::index_select(x, 0, kept), weight, kept_targets);
  CHECK(std::abs(cross_entropy(linear(x, weight), targets, ClassLossOptions{}).item() -
                 expected.loss) < 1e-13);
  for (const auto& [name, loss_of] : counted_losses()) {
    INFO(name);
    const LossAndGradients got = result_of(loss_of, x, weight, targets);
    // f64, of sums of at most 6 terms below 10.
    CHECK(std::abs(got.loss - expected.loss) < 1e-13);
    CHECK(largest_difference(got.dw, expected.dw) < 1e-13);
    std::vector<double> of_kept;
    for (const std::size_t r : {0, 2, 3, 5})
      of_kept.insert(of_kept.end(), got.dx.begin() + 3 * r, got.dx.begin() + 3 * r + 3);
    CHECK(largest_difference(of_kept, expected.dx) < 1e-13);
    for (const std::size_t r : {1, 4})
      for (std::size_t c = 0; c < 3; ++c) CHECK(got.dx[3 * r + c] == 0);
    check_gradients([&](const auto& v) { return loss_of(v[0], v[1], targets, {}); }, {x, weight});
  }
}

TEST_CASE("without a target that has a loss, the loss and all gradients are 0") {
  Draw draw;
  const Tensor x = draw.normal({3, 2}), weight = draw.normal({5, 2}),
               targets = targets_from({-100, -100, -100}, i64, draw.device);
  for (const auto& [name, loss_of] : counted_losses()) {
    INFO(name);
    const LossAndGradients got = result_of(loss_of, x, weight, targets);
    CHECK(got.loss == 0);
    CHECK(got.dx == std::vector<double>(6));
    CHECK(got.dw == std::vector<double>(10));
  }
}

TEST_CASE("a loss over a count is the mean over that many, times the ranks") {
  Draw draw;
  const Tensor x = draw.normal({4, 3}), weight = draw.normal({5, 3}),
               targets = targets_from({3, -100, 0, 4}, i64, draw.device);
  const auto count = [&](double all, int ranks) {
    return TargetCount{Tensor::full({}, all, f32, draw.device), ranks};
  };
  for (const auto& [name, loss_of] : counted_losses()) {
    INFO(name);
    const LossAndGradients own = result_of(loss_of, x, weight, targets),
                           of_eight = result_of(loss_of, x, weight, targets, count(8, 2));
    CHECK(std::abs(of_eight.loss - 0.75 * own.loss) < 1e-13);
    for (std::vector<double> all : {own.dw, own.dx}) {
      for (double& v : all) v *= 0.75;
      CHECK(largest_difference(all, all.size() == own.dw.size() ? of_eight.dw : of_eight.dx) <
            1e-13);
    }
    CHECK(loss_of(x, weight, targets_from({-100, -100, -100, -100}, i64, draw.device), count(0, 2))
              .item() == 0);
    CHECK_THROWS_WITH(loss_of(x, weight, targets, count(8, 0)),
                      Catch::Contains("the count of targets is [] of f32, of 0 ranks"));
    CHECK_THROWS_AS(loss_of(x, weight, targets, {Tensor::ones({1}, f32, draw.device), 1}),
                    ContractError);
  }
}
