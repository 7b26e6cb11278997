// Running sums and orders along a dimension, and elements set at indices, over layouts.
#include <algorithm>
#include <numeric>

#include "tests/tensor/host.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("running sums along each dimension of any layout, in both directions") {
  const Device device = any_device();
  Draw draw;
  std::vector<View> views = same_shape_views();
  views.push_back(odd_views()[1]);
  for (const View& view : views)
    for (const DType dtype : {f64, i32, boolean}) {
      const Pair x = draw(view, dtype, device);
      for (int d = 0; d < x.host.shape.ndim(); ++d)
        for (const auto direction : {raw::Direction::forward, raw::Direction::backward}) {
          INFO(view.name << ", " << dtype << ", dimension " << d << ", seed " << draw.seed);
          const bool reversed = direction == raw::Direction::backward;
          const Host expected = Host::build(x.host.shape, [&](Shape at) {
            const std::int64_t here = at[d], n = x.host.shape[d];
            double sum = 0;
            for (at[d] = reversed ? here : 0; at[d] < (reversed ? n : here + 1); ++at[d])
              sum += x.host.at(at);
            return sum;
          });
          // At most four terms of at most kLargest.
          check_values(raw::cumsum(x.tensor, d - x.host.shape.ndim(), direction),
                       dtype == f64 ? f64 : i64, expected,
                       [](double) { return 8 * 4 * kLargest * 0x1p-53; });
        }
    }
}

TEST_CASE("places in order along each dimension of any layout") {
  const Device device = any_device();
  Draw draw;
  std::vector<View> views = same_shape_views();
  views.push_back(odd_views()[1]);
  for (const View& view : views)
    for (const DType dtype : {f32, bf16, i64, boolean}) {
      const Pair x = draw(view, dtype, device);
      for (int d = 0; d < x.host.shape.ndim(); ++d)
        for (const auto order : {Order::ascending, Order::descending}) {
          INFO(view.name << ", " << dtype << ", dimension " << d << ", seed " << draw.seed);
          const Host expected = Host::build(x.host.shape, [&](Shape at) {
            std::vector<std::size_t> places(static_cast<std::size_t>(x.host.shape[d]));
            std::iota(places.begin(), places.end(), 0);
            const std::int64_t here = at[d];
            const auto value = [&](std::size_t i) {
              at[d] = static_cast<std::int64_t>(i);
              return x.host.at(at);
            };
            std::stable_sort(places.begin(), places.end(), [&](std::size_t i, std::size_t j) {
              return order == Order::ascending ? value(i) < value(j) : value(i) > value(j);
            });
            return static_cast<double>(places[static_cast<std::size_t>(here)]);
          });
          check_values(raw::argsort(x.tensor, d, order), i64, expected);
        }
    }
}

TEST_CASE("elements are set where an index says, the last of several") {
  const Device device = any_device();
  const Tensor x = Tensor::zeros({2, 3}, f32, device);
  const Tensor index = Tensor::from(std::vector<std::int64_t>{2, 2, -1, 0, 7, 1}, {2, 3}, device);
  const Tensor source = Tensor::from({1, 2, 3, 4, 5, 6}, {2, 3}, device);
  raw::scatter_into(x, 1, index, source);
  CHECK(x.to_vector<float>() == std::vector<float>{0, 0, 2, 4, 6, 0});
  CHECK_THROWS_WITH(raw::scatter_into(x, 0, index, raw::cast(source, f64)),
                    Catch::Contains("scatter") && Catch::Contains("f64"));
  CHECK_THROWS_AS(raw::scatter_into(x, 1, raw::cast(index, f32), source), ContractError);
}

TEST_CASE("slices with a step, diagonals and sizes that stay are views") {
  const Device device = any_device();
  const Tensor x = raw::reshape(Tensor::arange(12, i64, device), {3, 4});
  using List = std::vector<std::int64_t>;
  const auto of = [](const Tensor& t) { return raw::contiguous(t).to_vector<std::int64_t>(); };
  CHECK(of(raw::slice(x, 1, 0, 4, 3)) == List{0, 3, 4, 7, 8, 11});
  CHECK(of(raw::slice(x, 0, 1, 3, 5)) == List{4, 5, 6, 7});
  CHECK(raw::slice(x, 1, 2, 2, 2).shape() == Shape{3, 0});
  CHECK(of(raw::diagonal(x, 0, 0, 1)) == List{0, 5, 10});
  CHECK(of(raw::diagonal(x, 1, 0, 1)) == List{1, 6, 11});
  CHECK(of(raw::diagonal(x, -2, 0, 1)) == List{8});
  CHECK(of(raw::diagonal(x, 1, 1, 0)) == List{4, 9});
  CHECK(raw::diagonal(x, 9, 0, 1).shape() == Shape{0});
  CHECK(raw::expand(raw::slice(x, 0, 0, 1), {2, -1, 4}).shape() == Shape{2, 1, 4});
  CHECK(raw::diagonal(x, 0, 0, 1).storage() == x.storage());
  CHECK_THROWS_WITH(raw::slice(x, 1, 0, 4, 0), Catch::Contains("step of 0"));
  CHECK_THROWS_WITH(raw::diagonal(x, 0, 1, -1), Catch::Contains("named twice"));
  CHECK_THROWS_AS(raw::expand(x, {-1, 3, 4}), ContractError);
}
