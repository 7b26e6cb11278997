// Derivatives of arithmetic, elementwise functions and reductions, over layouts and broadcasts.
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using tessera::testing::check_gradients;
using tessera::testing::Draw;
using tessera::testing::layouts;

namespace {

struct Unary {
  const char* name;
  Tensor (*f)(const Tensor&);
  double low, high;  // inputs are drawn from here; negative low avoids |x| < 0.1
};

// Where a function is defined.
constexpr double lowest(std::string_view name) {
  return name == "log1p" ? 0.1 : name.find("log") == 0 || name.ends_with("sqrt") ? 0.5 : -2;
}

// The functions of unary.def that have a derivative.
#define TESSERA_UNARY(name, theirs, result, on_floats, on_integers, slope, ...) \
  TESSERA_CHECKS_##slope(name)
#define TESSERA_CHECKS_fused(name) {#name, [](const Tensor& x) { return name(x); }, -2, 2},
#define TESSERA_CHECKS_composed(name) \
  {#name, [](const Tensor& x) { return name(x); }, lowest(#name), 3},
#define TESSERA_CHECKS_steps(name)
#define TESSERA_CHECKS_own(name)

const Unary kUnary[] = {
#include "tessera/kernels/unary.def"
    {"neg", [](const Tensor& x) { return -x; }, -2, 2},
    {"square", [](const Tensor& x) { return square(x); }, -2, 2},
    {"reciprocal", [](const Tensor& x) { return reciprocal(x); }, 0.5, 3},
    {"log_sigmoid", [](const Tensor& x) { return log_sigmoid(x); }, -2, 2},
    {"leaky_relu", [](const Tensor& x) { return leaky_relu(x, 0.2); }, -2, 2},
    {"elu", [](const Tensor& x) { return elu(x, 1.5); }, -2, 2},
    {"clamp", [](const Tensor& x) { return clamp(x, 0.6, 2.4); }, 0.7, 2.3},
    {"clamp outside", [](const Tensor& x) { return clamp(x, 3, 4); }, 0, 2},
    {"pow 3", [](const Tensor& x) { return pow(x, 3.0); }, -2, 2},
    {"pow 0", [](const Tensor& x) { return pow(x, 0.0); }, -2, 2},
    {"pow -1.5", [](const Tensor& x) { return pow(x, -1.5); }, 0.5, 2},
    {"2 to the power", [](const Tensor& x) { return pow(2.0, x); }, -2, 2},
    {"scalar +", [](const Tensor& x) { return 1.5 + x; }, -2, 2},
    {"scalar -", [](const Tensor& x) { return 1.5 - x; }, -2, 2},
    {"scalar /", [](const Tensor& x) { return 1.5 / x; }, 0.5, 3},
    {"masked_fill", [](const Tensor& x) { return masked_fill(x, x > 0, 7) * x; }, -2, 2},
    {"where with scalars",
     [](const Tensor& x) { return where(x > 0, x, 3.0) * where(x > 0, -2.0, x); }, -2, 2},
    {"add scalar", [](const Tensor& x) { return x + 1.5; }, -2, 2},
    {"subtract scalar", [](const Tensor& x) { return x - 1.5; }, -2, 2},
    {"mul scalar", [](const Tensor& x) { return 2.5 * (x * -1.5); }, -2, 2},
    {"divide by scalar", [](const Tensor& x) { return x / 3.0; }, -2, 2},
    {"cast", [](const Tensor& x) { return cast(x, f64); }, -2, 2},
    {"sum", [](const Tensor& x) { return sum(x); }, -2, 2},
    {"norm", [](const Tensor& x) { return norm(x); }, -2, 2}};

struct Binary {
  const char* name;
  Tensor (*f)(const Tensor&, const Tensor&);
};
const Binary kBinary[] = {{"add", [](const Tensor& a, const Tensor& b) { return a + b; }},
                          {"sub", [](const Tensor& a, const Tensor& b) { return a - b; }},
                          {"mul", [](const Tensor& a, const Tensor& b) { return a * b; }},
                          {"div", [](const Tensor& a, const Tensor& b) { return a / b; }},
                          {"pow", [](const Tensor& a, const Tensor& b) { return pow(abs(a), b); }}};

}  // namespace

TEST_CASE("derivatives of functions of one tensor") {
  Draw draw;
  for (const Unary& op : kUnary)
    for (const auto& layout : layouts()) {
      INFO(op.name << ", " << layout.name << ", seed " << draw.seed);
      const Tensor x = op.low < 0 ? draw.away_from_zero(layout.shape)
                                  : draw.uniform(layout.shape, op.low, op.high);
      check_gradients([&](const auto& v) { return op.f(layout.view(v[0])); }, {x});
    }
}

TEST_CASE("derivatives of functions of two tensors of one shape") {
  Draw draw;
  for (const Binary& op : kBinary)
    for (const auto& left : layouts())
      for (const auto& right : layouts()) {
        if (left.view(draw.normal(left.shape)).shape() !=
            right.view(draw.normal(right.shape)).shape())
          continue;
        INFO(op.name << ", " << left.name << " and " << right.name << ", seed " << draw.seed);
        check_gradients([&](const auto& v) { return op.f(left.view(v[0]), right.view(v[1])); },
                        {draw.away_from_zero(left.shape), draw.away_from_zero(right.shape)});
      }
}

TEST_CASE("derivatives of functions of two tensors that broadcast") {
  Draw draw;
  const std::pair<Shape, Shape> shapes[] = {
      {{2, 3}, {3}},    {{3}, {2, 3}},       {{2, 1, 3}, {4, 1}}, {{}, {2, 2}},
      {{2, 2}, {}},     {{1}, {3, 1}},       {{2, 1}, {1, 3}},    {{0, 3}, {3}},
      {{1, 3}, {0, 3}}, {{2, 3, 2, 1}, {2}}, {{1, 1}, {1, 1}},    {{2, 0}, {2, 1}}};
  for (const Binary& op : kBinary)
    for (const auto& [a, b] : shapes) {
      INFO(op.name << ", " << a << " and " << b << ", seed " << draw.seed);
      check_gradients([&](const auto& v) { return op.f(v[0], v[1]); },
                      {draw.away_from_zero(a), draw.away_from_zero(b)});
    }
  const auto twice = [](const std::vector<Tensor>& v) { return v[0] * v[0] + v[0] / (v[0] + 3.0); };
  check_gradients(twice, {draw.uniform({5}, 0.5, 2)});
}

TEST_CASE("derivatives of where") {
  Draw draw;
  INFO("seed " << draw.seed);
  const auto condition = [&](const Shape& shape) {
    return draw.normal(shape) > Tensor::zeros({}, f64, draw.device);
  };
  const Tensor mask = condition({2, 3}), column = condition({2, 1}), none = condition({0, 3});
  const auto by = [](const Tensor& c) {
    return [c](const std::vector<Tensor>& v) { return where(c, v[0], v[1]); };
  };
  check_gradients(by(mask), {draw.normal({2, 3}), draw.normal({2, 3})});
  check_gradients(by(column), {draw.normal({3}), draw.normal({2, 1})});
  check_gradients(by(mask), {draw.normal({}), draw.normal({4, 1, 3})});
  check_gradients(by(none), {draw.normal({3}), draw.normal({})});
  check_gradients(
      [&](const auto& v) { return where(transpose(mask, 0, 1), transpose(v[0], 0, 1), v[1]); },
      {draw.normal({2, 3}), draw.normal({3, 2})});
}

TEST_CASE("derivatives of reductions over a dimension") {
  Draw draw;
  for (const auto& layout : layouts()) {
    INFO(layout.name << ", seed " << draw.seed);
    const Tensor x = draw.distinct(layout.shape);
    const int ndim = layout.view(x).ndim();
    for (int dim = -ndim; dim < ndim; ++dim)
      for (const auto keep : {raw::KeepDim::no, raw::KeepDim::yes}) {
        INFO("dimension " << dim);
        check_gradients([&](const auto& v) { return sum(layout.view(v[0]), dim, keep); }, {x});
        if (x.numel() == 0) continue;  // the mean and the maximum of nothing are not defined
        check_gradients([&](const auto& v) { return mean(layout.view(v[0]), dim, keep); }, {x});
        if (layout.name != "broadcast" || dim == 0 || dim == -2)  // ties have no derivative
          check_gradients([&](const auto& v) { return max(layout.view(v[0]), dim); }, {x});
      }
    if (x.numel() > 0) check_gradients([&](const auto& v) { return mean(layout.view(v[0])); }, {x});
  }
}

TEST_CASE("the gradient of a maximum goes to the first of equal ones") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Tensor x = Tensor::from({1, 3, 3, 2, 2, 2}, {2, 3}, device);
  x.require_grad();
  sum(max(x, 1)).backward();
  CHECK(x.grad().to_vector<float>() == std::vector<float>{0, 1, 0, 1, 0, 0});
}

TEST_CASE("a cast hands the gradient back in the dtype of its input") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Tensor x = Tensor::from({1, 2, 3}, {3}, device);
  x.require_grad();
  const Tensor wide = cast(cast(x, bf16), f64);
  (wide * wide).backward(Tensor::ones({3}, f64, device));
  CHECK(x.grad().dtype() == f32);
  CHECK(x.grad().to_vector<float>() == std::vector<float>{2, 4, 6});
}

TEST_CASE("swiglu of one tensor is that of its halves, derivatives included") {
  Draw draw;
  INFO("seed " << draw.seed);
  const auto one = [](const auto& v) { return swiglu(v[0]); };
  for (const Shape& shape : {Shape{4, 6}, Shape{2, 3, 8}, Shape{2}, Shape{0, 4}, Shape{3, 0}}) {
    INFO(shape);
    check_gradients(one, {draw.normal(shape)});
  }
  check_gradients([](const auto& v) { return swiglu(transpose(v[0], 0, 1)); },
                  {draw.normal({4, 3})});
  const Tensor x = draw.normal({5, 34}), g = draw.normal({5, 17});
  const auto bits = [&](const auto& f) {
    Tensor leaf = x.detach();
    leaf.require_grad();
    const Tensor y = f(mul(leaf, 2));
    y.backward(g);
    return std::pair(y.template to_vector<double>(), leaf.grad().template to_vector<double>());
  };
  CHECK(bits([](const Tensor& v) { return swiglu(v); }) ==
        bits([](const Tensor& v) { return swiglu(slice(v, 1, 0, 17), slice(v, 1, 17, 34)); }));
  CHECK_THROWS_AS(swiglu(draw.normal({2, 3})), ContractError);
  CHECK_THROWS_AS(swiglu(draw.normal({})), ContractError);
}

TEST_CASE("derivatives of swiglu") {
  Draw draw;
  for (const auto& layout : layouts()) {
    if (layout.shape.ndim() == 0) continue;  // it works on rows
    INFO(layout.name << ", seed " << draw.seed);
    check_gradients([&](const auto& v) { return swiglu(layout.view(v[0]), layout.view(v[1])); },
                    {draw.normal(layout.shape), draw.normal(layout.shape)});
  }
  INFO("seed " << draw.seed);
  // The halves of one projection, and a middle dimension of size 1 whose stride means nothing.
  check_gradients([](const auto& v) { return swiglu(slice(v[0], 1, 0, 3), slice(v[0], 1, 3, 6)); },
                  {draw.normal({4, 6})});
  check_gradients(
      [](const auto& v) { return swiglu(transpose(v[0], 0, 1), transpose(v[1], 0, 1)); },
      {draw.normal({1, 4, 3}), draw.normal({1, 4, 3})});
}
