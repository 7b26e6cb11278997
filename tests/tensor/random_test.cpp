// Tensors from numbers and random ones: shares are near their probabilities, keys decide alone.
#include <algorithm>
#include <numeric>

#include "tessera/tensor/make.hpp"
#include "tests/support/seed.hpp"
#include "tests/tensor/host.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

using List = std::vector<std::int64_t>;

// The share of `hits` in n draws of probability p is within five deviations of it, which one run in
// 1.7 million is not.
void near_share(std::int64_t hits, std::int64_t n, double p) {
  const double count = static_cast<double>(n);
  INFO(hits << " of " << n << ", expected a share of " << p);
  CHECK(std::abs(static_cast<double>(hits) - p * count) <= 5 * std::sqrt(p * (1 - p) * count) + 1);
}

}  // namespace

TEST_CASE("numbers at equal distances, a diagonal of ones, one hot rows") {
  const Device device = any_device();
  CHECK(arange(2, 9, 3, i64, device).to_vector<std::int64_t>() == List{2, 5, 8});
  CHECK(arange(3, -1, -2, i64, device).to_vector<std::int64_t>() == List{3, 1});
  CHECK(arange(1, 1, 1, f32, device).shape() == Shape{0});
  CHECK_THROWS_WITH(arange(0, 5, -1, f32, device), Catch::Contains("arange: no step of -1"));
  CHECK_THROWS_AS(arange(0, 5, 0, f32, device), ContractError);
  CHECK(linspace(1, 2, 5, f64, device).to_vector<double>() ==
        std::vector<double>{1, 1.25, 1.5, 1.75, 2});
  CHECK(linspace(3, 9, 1, f64, device).to_vector<double>() == std::vector<double>{3});
  CHECK(linspace(3, 9, 0, f64, device).numel() == 0);
  CHECK(eye(2, 3, i64, device).to_vector<std::int64_t>() == List{1, 0, 0, 0, 1, 0});
  CHECK(eye(2, f32, device).to_vector<float>() == std::vector<float>{1, 0, 0, 1});
  const Tensor index = Tensor::from(List{2, 0, 3}, {3}, device);
  CHECK(one_hot(index, 3).to_vector<std::int64_t>() == List{0, 0, 1, 1, 0, 0, 0, 0, 0});
  CHECK(one_hot(index, 3, f32).dtype() == f32);
  CHECK(one_hot(raw::reshape(index, {3, 1}), 0).shape() == Shape{3, 1, 0});
  CHECK_THROWS_WITH(one_hot(raw::cast(index, f32), 3), Catch::Contains("expected i32 or i64"));
}

TEST_CASE("whole random numbers lie in their range, each as often") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const std::uint64_t key = fresh_seed();
  INFO("key " << key);
  const std::int64_t n = 20000;
  const List drawn = randint(-2, 3, {n}, key, i64, device).to_vector<std::int64_t>();
  for (std::int64_t v = -2; v < 3; ++v) near_share(std::ranges::count(drawn, v), n, 0.2);
  CHECK(std::ranges::all_of(drawn, [](std::int64_t v) { return v >= -2 && v < 3; }));
  CHECK(randn({n}, key, device).to_vector<float>() ==
        Tensor::normal({n}, 0, 1, key, f32, device).to_vector<float>());
  CHECK(drawn == randint(-2, 3, {n}, key, i64, device).to_vector<std::int64_t>());
  CHECK(drawn != randint(-2, 3, {n}, key + 1, i64, device).to_vector<std::int64_t>());
  // The lower bits of a wide range are drawn, too.
  const List wide =
      randint(0, std::int64_t{1} << 40, {n}, key, i64, device).to_vector<std::int64_t>();
  near_share(std::ranges::count_if(wide, [](std::int64_t v) { return v % 2 == 0; }), n, 0.5);
  CHECK_THROWS_WITH(randint(3, 3, {1}, key, i64, device), Catch::Contains("[3, 3)"));
}

TEST_CASE("coins fall by their probabilities") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const std::uint64_t key = fresh_seed();
  INFO("key " << key);
  const std::int64_t n = 20000;
  const auto ones = [](const Tensor& t) {
    return static_cast<std::int64_t>(raw::reduce_all(raw::Reduction::sum, t).item());
  };
  near_share(ones(bernoulli(0.3, {n}, key, i64, device)), n, 0.3);
  CHECK(ones(bernoulli(0.0, {n}, key, i64, device)) == 0);
  CHECK(ones(bernoulli(1.0, {n}, key, i64, device)) == n);
  const Tensor p = raw::expand(Tensor::from({0, 0.9F}, {2, 1}, device), {2, n});
  const Tensor drawn = bernoulli(p, key);
  CHECK(drawn.dtype() == f32);
  CHECK(ones(raw::slice(drawn, 0, 0, 1)) == 0);
  near_share(ones(raw::slice(drawn, 0, 1, 2)), n, 0.9);
  CHECK_THROWS_WITH(bernoulli(1.5, {n}, key, i64, device), Catch::Contains("p is 1.5"));
}

TEST_CASE("permutations hold each place once, anywhere") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const std::uint64_t key = fresh_seed();
  INFO("key " << key);
  List drawn = randperm(1000, key, device).to_vector<std::int64_t>();
  CHECK(drawn != randperm(1000, key + 1, device).to_vector<std::int64_t>());
  std::ranges::sort(drawn);
  List all(1000);
  std::iota(all.begin(), all.end(), 0);
  CHECK(drawn == all);
  std::int64_t firsts = 0;
  for (std::uint64_t i = 0; i < 2000; ++i)
    firsts += randperm(4, key + i, device).to_vector<std::int64_t>()[0] == 2;
  near_share(firsts, 2000, 0.25);
  CHECK(randperm(0, key, device).numel() == 0);
}

TEST_CASE("places are drawn by their weights, with and without replacement") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const std::uint64_t key = fresh_seed();
  INFO("key " << key);
  const std::int64_t n = 20000;
  const Tensor weights = Tensor::from({0, 1, 3, 5, 0, 0}, {2, 3}, device);
  const Tensor many = multinomial(weights, n, Replacement::yes, key);
  CHECK(many.shape() == Shape{2, n});
  const List drawn = many.to_vector<std::int64_t>();
  const auto hits = [&](std::int64_t row, std::int64_t place) {
    return std::count(drawn.begin() + row * n, drawn.begin() + (row + 1) * n, place);
  };
  CHECK(hits(0, 0) == 0);
  near_share(hits(0, 1), n, 0.25);
  CHECK(hits(1, 0) == n);
  // Without: rows of two, of which the first is drawn by weight and the other is left.
  const Tensor rows = raw::expand(raw::slice(weights, 0, 0, 1), {n, 3});
  const List pairs = multinomial(rows, 2, Replacement::no, key).to_vector<std::int64_t>();
  std::int64_t ones = 0;
  bool differ = true;
  for (std::size_t i = 0; i < pairs.size(); i += 2) {
    ones += pairs[i] == 1;
    differ = differ && pairs[i] + pairs[i + 1] == 3;
  }
  CHECK(differ);
  near_share(ones, n, 0.25);
  CHECK(multinomial(weights, 0, Replacement::no, key).shape() == Shape{2, 0});
  CHECK_THROWS_WITH(multinomial(weights, 4, Replacement::no, key),
                    Catch::Contains("draw fewer, or with replacement"));
}
