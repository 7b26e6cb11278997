// The global norm, over one rank and several, and what it does to gradients.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "runtime/param/parameter_state.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/distributed/collectives.hpp"
#include "tessera/optim/clip.hpp"
#include "tests/optim/clipped.hpp"
#include "tests/support/race_check.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/thrown.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

double sum_of_squares(const std::map<std::size_t, Values>& gradients) {
  double sum = 0;
  for (const auto& [i, g] : gradients)
    for (const float x : g) sum += static_cast<double>(x) * x;
  return sum;
}

}  // namespace

TEST_CASE("gradients are scaled to the maximum norm, and the norm before is returned", "[optim]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Device device = Device::cpu();
  Bag bag(kClippedShapes);
  bag.materialize(device);
  const auto gradients = random_gradients(draw, 0.1f, 3);
  give_gradients(bag, gradients);
  const double norm = std::sqrt(sum_of_squares(gradients));
  const Tensor returned = optim::clip_grad_norm(bag.parameters(), 1.5);
  CHECK(returned.shape() == Shape{});
  CHECK(returned.dtype() == f32);
  CHECK(std::abs(returned.item() / norm - 1) <= 0x1p-23);  // summed in f64, rounded to f32 once
  for (std::size_t i = 0; i < kClippedShapes.size(); ++i) {
    const Values got = bag.items[i].grad().to_vector<float>();
    for (std::size_t k = 0; k < got.size(); ++k) {
      const double expected = gradients.at(i)[k] * (1.5 / (norm + 1e-6));
      CHECK(std::abs(got[k] - expected) <= 0x1p-22 * std::abs(expected));  // factor and product
    }
  }
  // Counts lie behind the gradients in the same array and must not be scaled.
  const Values counts = state_of(bag.items[0])->group->counts().to_vector<float>();
  CHECK(std::count(counts.begin(), counts.end(), 1.0f) == 3);
}

TEST_CASE("small gradients, a maximum of 0 and one of infinity leave every bit", "[optim]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Device device = Device::cpu();
  Bag bag(kClippedShapes);
  bag.materialize(device);
  const auto gradients = random_gradients(draw, 0.1f, 3);
  give_gradients(bag, gradients);
  const double norm = std::sqrt(sum_of_squares(gradients));
  for (const double limit : {norm * 2, 0.0, -1.0, static_cast<double>(INFINITY)}) {
    CHECK(std::abs(optim::clip_grad_norm(bag.parameters(), limit).item() / norm - 1) <= 0x1p-23);
    for (std::size_t i = 0; i < kClippedShapes.size(); ++i)
      CHECK(bag.items[i].grad().to_vector<float>() == gradients.at(i));
  }
  CHECK_THROWS_AS(optim::clip_grad_norm(bag.parameters(), NAN), ContractError);
  CHECK_THROWS_AS(optim::clip_grad_norm({}, 1), ContractError);
}

TEST_CASE("the sum and the largest of all magnitudes are norms, too", "[optim]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Device device = Device::cpu();
  for (const optim::NormType type : {optim::NormType::l1, optim::NormType::inf}) {
    Bag bag(kClippedShapes);
    bag.materialize(device);
    auto gradients = random_gradients(draw, 0.1f, 3);
    give_gradients(bag, gradients);
    double norm = 0;
    for (const auto& [i, g] : gradients)
      for (const float x : g)
        norm = type == optim::NormType::l1 ? norm + std::abs(double{x})
                                           : std::max(norm, std::abs(double{x}));
    // In f64, rounded to f32 once.
    const double got = optim::clip_grad_norm(bag.parameters(), 0.5, type).item();
    CHECK(std::abs(got / norm - 1) <= 0x1p-23);
    const Values scaled = bag.items[2].grad().to_vector<float>();
    for (std::size_t k = 0; k < scaled.size(); ++k) {
      const double expected = gradients.at(2)[k] * (0.5 / (norm + 1e-6));
      CHECK(std::abs(scaled[k] - expected) <= 0x1p-22 * std::abs(expected));
    }
    gradients[1][2] = NAN;
    give_gradients(bag, gradients);
    CHECK(std::isnan(optim::clip_grad_norm(bag.parameters(), 0.5, type).item()));
  }
}

TEST_CASE("only the gradients of the parameters given are summed and scaled", "[optim]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Device device = Device::cpu();
  Bag bag(kClippedShapes);
  bag.materialize(device);
  const auto gradients = random_gradients(draw, 0.1f, 3);
  give_gradients(bag, gradients);
  const auto given = GENERATE(std::set<std::size_t>{1}, std::set<std::size_t>{0, 1},
                              std::set<std::size_t>{0, 2}, std::set<std::size_t>{2});
  std::vector<Parameter> parameters;
  double sum = 0;
  for (const std::size_t i : given) {
    parameters.push_back(bag.items[i]);
    sum += sum_of_squares({{i, gradients.at(i)}});
  }
  const double norm = std::sqrt(sum);
  CHECK(std::abs(optim::clip_grad_norm(parameters, norm / 2).item() / norm - 1) <= 0x1p-23);
  for (std::size_t i = 0; i < kClippedShapes.size(); ++i) {
    const Values got = bag.items[i].grad().to_vector<float>();
    for (std::size_t k = 0; k < got.size(); ++k) {
      const double factor = given.contains(i) ? norm / 2 / (norm + 1e-6) : 1;
      const double expected = gradients.at(i)[k] * factor;
      CHECK(std::abs(got[k] - expected) <= (given.contains(i) ? 0x1p-22 * std::abs(expected) : 0));
    }
  }
}

// Each rank a stage of a pipeline with a tensor of its own. In units of 2^-24 the norm is moved by
// 1 where own norms are rounded to f32, 1/2 by their squares, 1 by the two additions and 1 by the
// root, then factor and product by 1 each: 5.5, and what is of second order.
TEST_CASE("stages of a pipeline scale by a norm that they have put together", "[optim][threads]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const auto gradients = random_gradients(draw, 0.1f, 3);
  const double norm = std::sqrt(sum_of_squares(gradients));
  const auto how = GENERATE(optim::Clip::in_place, optim::Clip::in_optimizer);
  const double limit = GENERATE(1.5, 0.0, 1e6);
  std::vector<Values> scaled(3);
  run_checked(3, {.threads = 1}, [&](World& world) {
    const auto i = static_cast<std::size_t>(world.rank());
    Bag stage(std::vector<Shape>{kClippedShapes[i]});
    stage.materialize(world.device());
    give_gradients(stage, {{0, gradients.at(i)}});
    const Tensor own = optim::clip_grad_norm(stage.parameters(), 0);
    const Tensor all = raw::sqrt(dist::all_reduce(own * own, world));
    optim::clip_grads_with_norm(stage.parameters(), limit, all, how);
    scaled[i] = stage.items[0].grad().to_vector<float>();
  });
  for (std::size_t i = 0; i < 3; ++i)
    for (std::size_t k = 0; k < scaled[i].size(); ++k) {
      const double factor = limit == 1.5 ? limit / (norm + 1e-6) : 1;
      const double expected = gradients.at(i)[k] * factor;
      CHECK(std::abs(scaled[i][k] - expected) <=
            (factor < 1 ? 6 * 0x1p-24 * std::abs(expected) : 0));
    }
}

TEST_CASE("a norm that gradients can't be scaled by is told", "[optim]") {
  const Device device = Device::cpu();
  Bag bag(std::vector<Shape>{{3}});
  bag.materialize(device);
  const auto said = [&](const Tensor& norm, double most = 1) {
    return thrown_by([&] { optim::clip_grads_with_norm(bag.parameters(), most, norm); });
  };
  using Catch::Matchers::Contains;
  CHECK_THAT(said(Tensor()), Contains("the norm is undefined; expected one f32"));
  CHECK_THAT(said(Tensor::zeros({2}, f32, device)), Contains("the norm is f32 of [2]; expected"));
  CHECK_THAT(said(Tensor::zeros({}, f64, device)), Contains("the norm is f64 of []; expected"));
  CHECK_THAT(said(Tensor::zeros({}, f32, Device::meta())), Contains("on another device"));
  CHECK_THAT(said(Tensor::zeros({}, f32, device), NAN), Contains("max_norm is NaN"));
}

TEST_CASE("the norm ignores missing gradients, and is 0 without any", "[optim]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Device device = Device::cpu();
  Bag bag(kClippedShapes);
  bag.materialize(device);
  CHECK(optim::clip_grad_norm(bag.parameters(), 1).item() == 0);
  auto gradients = random_gradients(draw, 0.1f, 3);
  gradients.erase(1);
  give_gradients(bag, gradients);
  const double norm = std::sqrt(sum_of_squares(gradients));
  CHECK(std::abs(optim::clip_grad_norm(bag.parameters(), 1).item() / norm - 1) <= 0x1p-23);
}

TEST_CASE("a norm that is no number is returned and reaches the gradients", "[optim]") {
  Draw draw;
  const Device device = Device::cpu();
  Bag bag(kClippedShapes);
  bag.materialize(device);
  auto gradients = random_gradients(draw, 0.1f, 3);
  gradients[2][5] = NAN;
  give_gradients(bag, gradients);
  CHECK(std::isnan(optim::clip_grad_norm(bag.parameters(), 1).item()));
  CHECK(std::isnan(bag.items[0].grad().to_vector<float>()[0]));
}

TEST_CASE("ranks with different shards find one norm and one factor",
          "[optim][threads][fsdp2-101]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const int ranks = 3;
  std::vector<std::map<std::size_t, Values>> all;
  double sum = 0;
  for (int r = 0; r < ranks; ++r) {
    Draw draw{.seed = seed + static_cast<std::uint64_t>(r)};
    all.push_back(random_gradients(draw, 0.1f, 3));
    sum += sum_of_squares(all.back());
  }
  const double norm = std::sqrt(sum);
  double magnitudes = 0, largest = 0;
  for (const auto& gradients : all)
    for (const auto& [i, g] : gradients)
      for (const float x : g) {
        magnitudes += std::abs(double{x});
        largest = std::max(largest, std::abs(double{x}));
      }
  std::vector<double> norms(ranks), of_magnitudes(ranks), of_largest(ranks);
  std::vector<Values> scaled(ranks);
  run_checked(ranks, {}, [&](World& world) {
    const auto r = static_cast<std::size_t>(world.rank());
    Bag bag(kClippedShapes);  // stands for this rank's shards
    bag.materialize(world.device());
    state_of(bag.items[0])->group->sums = {world.share(), &world.control()};
    give_gradients(bag, all[r]);
    of_magnitudes[r] = optim::clip_grad_norm(bag.parameters(), 0, optim::NormType::l1).item();
    of_largest[r] = optim::clip_grad_norm(bag.parameters(), 0, optim::NormType::inf).item();
    norms[r] = optim::clip_grad_norm(bag.parameters(), 2).item();
    scaled[r] = bag.items[2].grad().to_vector<float>();
  });
  for (std::size_t r = 0; r < norms.size(); ++r) {
    CHECK(std::abs(norms[r] / norm - 1) <= 0x1p-23);
    CHECK(norms[r] == norms[0]);
    CHECK(std::abs(of_magnitudes[r] / magnitudes - 1) <= 0x1p-23);
    CHECK(of_largest[r] == largest);
    for (std::size_t k = 0; k < scaled[r].size(); ++k) {
      const double expected = all[r].at(2)[k] * (2 / (norm + 1e-6));
      CHECK(std::abs(scaled[r][k] - expected) <= 0x1p-22 * std::abs(expected));
    }
  }
}
