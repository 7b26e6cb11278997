// Derivatives of reductions over any dimensions, of extremes and of orders.
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::check_gradients;
using tessera::testing::Draw;
using tessera::testing::layouts;

TEST_CASE("derivatives of reductions over any dimensions of any layout") {
  Draw draw;
  struct Reduction {
    const char* name;
    Tensor (*f)(const Tensor&, const Dims&, raw::KeepDim, Caller);
  };
  const Reduction reductions[] = {{"sum", sum},
                                  {"mean", mean},
                                  {"prod", prod},
                                  {"norm", norm},
                                  {"logsumexp", logsumexp},
                                  {"amax", amax},
                                  {"amin", amin},
                                  {"var", [](const Tensor& x, const Dims& d, raw::KeepDim k,
                                             Caller) { return var(x, d, 1, k); }},
                                  {"stddev", [](const Tensor& x, const Dims& d, raw::KeepDim k,
                                                Caller) { return stddev(x, d, 0, k); }}};
  for (const auto& layout : layouts()) {
    const Tensor x = draw.distinct(layout.shape) + 0.5;
    const bool is_repeated = layout.name == "broadcast";  // ties, and a deviation of 0, are kinks
    for (const Reduction& r : reductions)
      for (const Dims& dims : {Dims(), Dims({0, 1}), Dims(-1), Dims(0)})
        for (const auto keep : {raw::KeepDim::no, raw::KeepDim::yes}) {
          INFO(r.name << " of " << layout.name << ", mask " << dims.mask(2) << ", seed "
                      << draw.seed);
          const std::string name = r.name;
          if (layout.shape.ndim() == 0 && (name == "stddev" || name == "var")) continue;
          if (layout.view(x).ndim() < 2 && dims.mask(2) == 3) continue;
          const bool has_kink = name == "amax" || name == "amin" || name == "stddev";
          if (is_repeated && has_kink) continue;
          if (x.numel() == 0 && name != "sum" && name != "prod") continue;
          check_gradients(
              [&](const auto& v) { return r.f(layout.view(v[0]), dims, keep, Caller::current()); },
              {x});
        }
  }
}

TEST_CASE("derivatives of chosen and ordered elements") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.distinct({3, 4, 2});
  for (const int dim : {0, 1, -1}) {
    check_gradients([&](const auto& v) { return min(v[0], dim); }, {x});
    check_gradients([&](const auto& v) { return max(v[0], dim, raw::KeepDim::yes); }, {x});
    check_gradients([&](const auto& v) { return cumsum(transpose(v[0], 0, 2), dim); }, {x});
    check_gradients([&](const auto& v) { return sort(v[0], dim).values; }, {x});
    check_gradients([&](const auto& v) { return topk(v[0], 2, dim, Order::ascending).values; },
                    {x});
  }
  check_gradients([](const auto& v) { return max(v[0]) * min(v[0]); }, {x});
  const Tensor none = draw.normal({0, 3});
  check_gradients([](const auto& v) { return cumsum(v[0], 0); }, {none});
  check_gradients([](const auto& v) { return sort(v[0], 0).values; }, {none});
  check_gradients([](const auto& v) { return max(v[0], 1); }, {none});
}

TEST_CASE("a product keeps the gradient of its zeros") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Tensor x = Tensor::from({2, 0, 3}, {3}, device);
  x.require_grad();
  prod(x).backward();
  CHECK(x.grad().to_vector<float>() == std::vector<float>{0, 6, 0});
}
