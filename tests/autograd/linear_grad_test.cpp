// Derivatives of linear layers: alone, several of one input, with GELU between them, and added to a
// residual. Parameters are leaves, so their gradients take the direct way; an operation in front of
// them makes them take the other one.
#include <algorithm>
#include <cmath>

#include "tessera/autograd/recompute.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::behind;
using tessera::testing::check_gradients;
using tessera::testing::Draw;

TEST_CASE("the products of several linear layers add up the gradient of their input themselves") {
  struct Names final : Observer {
    void launched(StreamId, Tick, const Op& op) override { seen.emplace_back(op.name); }
    std::vector<std::string> seen;
  };
  constexpr std::int64_t N = 6, in = 5, width = 9;
  Draw draw;
  INFO("seed " << draw.seed);
  for (const DType dtype : {f64, f32, bf16}) {
    const auto given = [&](const Shape& shape) { return raw::cast(draw.normal(shape), dtype); };
    const std::vector<Tensor> w{given({width, in}), given({width, in}), given({width, in})};
    const Tensor data = given({2, N / 2, in}), gradient = given({2, N / 2, width}),
                 of_residual = given({2, N / 2, in});
    const auto f = [&](const Tensor& x) {
      return linear(x, w[0]) + linear(x, w[1]) + linear(x, w[2]);
    };
    const auto backward = [&](const Tensor& loss) {
      Names names;
      draw.device.context().add_observer(names);
      loss.backward(Tensor::full({}, 1, dtype, draw.device));
      draw.device.context().remove_observer(names);
      return names.seen;
    };
    // The gradient at a leaf, directly and behind an operation, with nothing but products; by a
    // recomputed function; and with one of a residual, which others see, there first.
    const auto run = [&](const auto& use, bool is_leaf) {
      const Tensor x = data.detach().require_grad();
      const auto names = backward(use(is_leaf ? x : behind(x)));
      return std::pair(testing::bytes_of(x.grad()), names);
    };
    const auto weighted = [&](const Tensor& y) { return sum(y * gradient); };
    const auto [dx, names] = run([&](const Tensor& x) { return weighted(f(x)); }, true);
    CHECK(std::ranges::count(names, "axpby") == 0);
    CHECK(std::ranges::count(names, "matmul") == 3);
    const auto [behind_one, more] = run([&](const Tensor& x) { return weighted(f(x)); }, false);
    CHECK(behind_one == dx);
    CHECK(std::ranges::count(more, "axpby") == 1);  // of the leaf, from the operation
    CHECK(run([&](const Tensor& x) { return weighted(recompute(f, x)); }, true).first == dx);
    const auto with_residual = [&](const Tensor& x) {
      return sum(x * of_residual) + weighted(f(x));
    };
    run(with_residual, false);

    // Three products of `width` terms in f32, and a rounding to the dtype after each.
    const Tensor x = data.detach().require_grad();
    backward(with_residual(behind(x)));
    const auto wide = [](const Tensor& t) { return raw::cast(t, f64).to_vector<double>(); };
    const auto g = wide(gradient), r = wide(of_residual), found = wide(x.grad());
    for (std::int64_t row = 0; row < N; ++row)
      for (std::int64_t column = 0; column < in; ++column) {
        const auto at = static_cast<std::size_t>(row * in + column);
        double sum = r[at], amounts = std::abs(sum);
        for (const Tensor& weight : w) {
          const auto values = wide(weight);
          for (std::int64_t k = 0; k < width; ++k) {
            const double term = g[static_cast<std::size_t>(row * width + k)] *
                                values[static_cast<std::size_t>(k * in + column)];
            sum += term;
            amounts += std::abs(term);
          }
        }
        const double unit = dtype == f64 ? 0x1p-53 : 0x1p-24;
        const double roundings = (3 * width + 4) * unit + (dtype == bf16 ? 3 * 0x1p-8 : 0);
        CHECK(std::abs(found[at] - sum) <= 1.01 * roundings * amounts);
      }
  }
}

TEST_CASE("derivatives of linear") {
  Draw draw;
  const auto f = [](const std::vector<Tensor>& v) { return linear(v[0], v[1], v[2]); };
  const auto without_bias = [](const std::vector<Tensor>& v) { return linear(v[0], v[1]); };
  for (const Shape& x : {Shape{5, 3}, Shape{2, 2, 3}, Shape{3}, Shape{0, 3}, Shape{2, 0, 3}}) {
    INFO("x " << x << ", seed " << draw.seed);
    check_gradients(f, {draw.normal(x), draw.normal({4, 3}), draw.normal({4})});
    check_gradients(without_bias, {draw.normal(x), draw.normal({4, 3})});
  }
  INFO("seed " << draw.seed);
  check_gradients(f, {draw.normal({2, 0}), draw.normal({4, 0}), draw.normal({4})});
  check_gradients(f, {draw.normal({2, 3}), draw.normal({0, 3}), draw.normal({0})});
  check_gradients(
      [](const auto& v) {
        return linear(transpose(v[0], 0, 1), transpose(v[1], 0, 1),
                      reshape(slice(v[2], 1, 1, 2), {4}));
      },
      {draw.normal({3, 5}), draw.normal({3, 4}), draw.normal({4, 2})});
  check_gradients([](const auto& v) { return linear(v[0], behind(v[1]), behind(v[2])); },
                  {draw.normal({2, 3}), draw.normal({4, 3}), draw.normal({4})});
  check_gradients([](const auto& v) { return linear(linear(v[0], v[1], v[2]), v[1], v[2]); },
                  {draw.normal({2, 3}), draw.normal({3, 3}), draw.normal({3})});
}

TEST_CASE("derivatives of linear layers that add to a residual") {
  Draw draw;
  const auto f = [](const std::vector<Tensor>& v) { return add_linear(v[3], v[0], v[1], v[2]); };
  const auto behind_gelu = [](const std::vector<Tensor>& v) {
    return add_linear(v[0], linear_gelu(v[0], v[1]), v[2], v[3]);
  };
  for (const auto& [x, y] : {std::pair<Shape, Shape>{{5, 3}, {5, 4}},
                             {{2, 2, 3}, {2, 2, 4}},
                             {{3}, {4}},
                             {{0, 3}, {0, 4}}}) {
    INFO("x " << x << ", seed " << draw.seed);
    check_gradients(f, {draw.normal(x), draw.normal({4, 3}), draw.normal({4}), draw.normal(y)});
    check_gradients(behind_gelu,
                    {draw.normal(x), draw.normal({4, 3}), draw.normal({3, 4}), draw.normal({3})});
  }
  INFO("seed " << draw.seed);
  check_gradients(
      [](const auto& v) {
        return add_linear(transpose(v[2], 0, 1), transpose(v[0], 0, 1), behind(v[1]));
      },
      {draw.normal({3, 5}), draw.normal({4, 3}), draw.normal({4, 5})});
  const Tensor x = draw.normal({5, 3}), w = draw.normal({4, 3});
  CHECK_THROWS_WITH(add_linear(draw.normal({4}), x, w),
                    Catch::Contains("the residual is [4]") && Catch::Contains("[5, 4]"));
  CHECK_THROWS_WITH(add_linear(raw::cast(draw.normal({5, 4}), f32), x, w),
                    Catch::Contains("of f32") && Catch::Contains("expected the same"));
}

TEST_CASE("derivatives of linear layers with GELU between them") {
  Draw draw;
  const auto f = [](const std::vector<Tensor>& v) {
    return linear(linear_gelu(v[0], v[1], v[2]), v[3], v[4]);
  };
  for (const Shape& x : {Shape{5, 3}, Shape{2, 2, 3}, Shape{3}, Shape{0, 3}}) {
    INFO("x " << x << ", seed " << draw.seed);
    check_gradients(f, {draw.normal(x), draw.normal({4, 3}), draw.normal({4}), draw.normal({2, 4}),
                        draw.normal({2})});
  }
  INFO("seed " << draw.seed);
  check_gradients(
      [](const auto& v) {
        return linear(linear_gelu(transpose(v[0], 0, 1), behind(v[1])), transpose(v[2], 0, 1));
      },
      {draw.normal({3, 5}), draw.normal({4, 3}), draw.normal({4, 2})});
}

TEST_CASE("GELU within the products has the bits of GELU between them") {
  Draw draw;
  INFO("seed " << draw.seed);
  const std::vector<Tensor> values = {draw.normal({5, 3}), draw.normal({7, 3}), draw.normal({7}),
                                      draw.normal({2, 7})};
  for (const DType dtype : {f32, bf16}) {
    std::vector<std::vector<double>> seen[2];
    for (const bool within : {false, true}) {
      std::vector<Tensor> v;
      for (const Tensor& x : values) v.push_back(raw::cast(x, dtype).require_grad());
      const Tensor y = within ? linear(linear_gelu(v[0], v[1], v[2]), v[3])
                              : linear(gelu(linear(v[0], v[1], v[2])), v[3]);
      sum(y).backward();
      seen[within].push_back(raw::cast(y, f64).to_vector<double>());
      for (const Tensor& x : v)
        seen[within].push_back(raw::cast(x.grad(), f64).to_vector<double>());
    }
    CHECK(seen[0] == seen[1]);
  }
}
