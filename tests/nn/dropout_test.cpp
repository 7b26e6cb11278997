// Dropout's masks: how many, whose, and the same again where they must be.
#include <algorithm>

#include "tessera/autograd/random.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/distributed/collectives.hpp"
#include "tessera/nn/dropout.hpp"
#include "tests/nn/helpers.hpp"

using namespace tessera;
using namespace tessera::testing;
using autograd::RandomStateGuard;

namespace {
std::vector<float> masks(nn::Dropout& layer, const Shape& shape, const Device& device) {
  return layer(Tensor::ones(shape, f32, device)).to_vector<float>();
}
}  // namespace

TEST_CASE("dropout keeps its share of the elements and scales them", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const RandomStateGuard guard({.seed = draw.seed});
  nn::Dropout layer(0.25);
  const std::vector<float> y = masks(layer, {400, 250}, draw.device);
  const float kept = 1 / 0.75f;
  CHECK(std::all_of(y.begin(), y.end(), [&](float v) { return v == 0 || v == kept; }));
  // Of n = 1e5 elements n p are dropped, deviation sqrt(n p (1 - p)) = 137; 6 of them are 822.
  CHECK(std::abs(std::count(y.begin(), y.end(), 0.0f) - 25000) < 822);

  Tensor x = draw.tensor({8, 5}).require_grad();
  const Tensor out = layer(x);
  out.backward(Tensor::ones({8, 5}, f32, draw.device));
  const auto in = x.to_vector<float>(), result = out.to_vector<float>(),
             slope = x.grad().to_vector<float>();
  for (std::size_t i = 0; i < in.size(); ++i) {
    CHECK(result[i] == in[i] * slope[i]);
    CHECK((slope[i] == 0 || slope[i] == kept));
  }
}

TEST_CASE("dropout does nothing in evaluation and for p = 0", "[nn]") {
  Draw draw;
  const RandomStateGuard guard({.seed = draw.seed});
  nn::Dropout layer(0.5), none(0);
  const Tensor x = draw.tensor({3, 4});
  CHECK(none(x).to_vector<float>() == x.to_vector<float>());
  layer.eval();
  CHECK(layer(x).to_vector<float>() == x.to_vector<float>());
  CHECK(autograd::random_state().draws == 0);
  CHECK_THROWS_AS(nn::Dropout(1.0), ContractError);
  CHECK_THROWS_AS(nn::Dropout(-0.1), ContractError);
}

TEST_CASE("a mask depends on seed, number of the draw and global row only", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  nn::Dropout layer(0.5);
  const auto mask = [&](std::uint64_t seed, std::uint64_t draws, std::int64_t first_row,
                        std::int64_t rows) {
    const RandomStateGuard guard({.seed = seed, .draws = draws, .first_row = first_row});
    return masks(layer, {rows, 3, 8}, draw.device);
  };
  const std::vector<float> whole = mask(draw.seed, 5, 0, 6);
  CHECK(whole == mask(draw.seed, 5, 0, 6));
  CHECK(whole != mask(draw.seed, 6, 0, 6));
  CHECK(whole != mask(draw.seed + 1, 5, 0, 6));
  const std::vector<float> part = mask(draw.seed, 5, 2, 3);  // what a rank with rows 2..4 sees
  CHECK(std::equal(part.begin(), part.end(), whole.begin() + 2 * 24));

  const RandomStateGuard guard({.seed = draw.seed});
  const auto first = masks(layer, {4, 8}, draw.device), second = masks(layer, {4, 8}, draw.device);
  CHECK(first != second);
  CHECK(autograd::random_state().draws == 2);
}

TEST_CASE("ranks that are told nothing drop other elements, and those of one batch together",
          "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const auto of_rank = [&](int rank, const Shape& shape) {
    const RandomStateGuard guard({.seed = draw.seed});
    nn::Dropout layer(0.5);
    return masks(layer, shape, Device::cpu({.rank = rank}));
  };
  const std::vector<float> whole = of_rank(0, {8, 32});
  for (const int ranks : {1, 2, 4}) {
    std::vector<float> together;
    for (int r = 0; r < ranks; ++r)
      for (const float kept : of_rank(r, {8 / ranks, 32})) together.push_back(kept);
    CHECK(together == whole);
  }
  // No row, and no rank, has a multiple of 4 elements: 3 of 63 repeat one of the lower ranks at
  // most, and of n others half are equal, deviation sqrt(n) / 2; 6 of them are 24 of 63.
  const std::vector<float> first = of_rank(0, {9, 7});
  for (const int rank : {1, 2, 3}) {
    const std::vector<float> other = of_rank(rank, {9, 7});
    int equal = 0;
    for (std::size_t i = 0; i < first.size(); ++i) equal += first[i] == other[i];
    CHECK(std::abs(equal - 31) < 27);
  }
  CHECK(of_rank(1, {1}).size() == 1);
}

TEST_CASE("a world's ranks keep independent elements, run again the same ones", "[nn]") {
  run_local(2, {}, [](World& world) {
    nn::Dropout layer(0.5);
    const Tensor ones = Tensor::ones({64, 64}, f32, world.device()).require_grad();
    const Tensor y = recompute([&](const Tensor& x) { return layer(x); }, ones);
    y.backward(ones.detach());
    CHECK(ones.grad().to_vector<float>() == y.to_vector<float>());
    const Tensor kept = raw::cast(raw::binary(raw::Binary::ne, y.detach(), 0.0), f32);
    const auto by_ranks = dist::all_reduce(kept, world).to_vector<float>();
    const auto by_one = std::count(by_ranks.begin(), by_ranks.end(), 1.0f);
    // Half of 4096, deviation 32; 6 of them.
    CHECK(std::abs(by_one - 2048) < 192);
  });
}
