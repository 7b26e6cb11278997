// Copies and elementwise operations against their definitions, over dtypes, layouts and broadcasts.
// Layouts are what the tensor layer adds to kernels; accuracy to the last bit is tested with them.
#include "tests/support/share.hpp"
#include "tests/tensor/host.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;
using raw::Binary;

namespace {

constexpr DType kFloating[] = {f32, f64, bf16, f16};
constexpr DType kAll[] = {f32, f64, bf16, f16, i32, i64, boolean};

// 16-bit results are computed in f32 and rounded once. Functions, and their references in f64, are
// each good to 16 roundings of 1 + |result|: fewer than ten happen, on intermediates of at most
// kLargest / 2 (1 + tanh in gelu) where the result is smaller than they are.
std::function<double(double)> few_roundings(DType dtype) {
  const double once = dtype == bf16 || dtype == f16 ? 1.01 * unit_roundoff(dtype) : 0;
  const double inner = 32 * unit_roundoff(dtype == f64 ? f64 : f32);
  const double subnormal = dtype == f16 ? 0x1p-25 : 0;  // half the spacing of the smallest halves
  return [=](double v) { return once * std::abs(v) + inner * (1 + std::abs(v)) + subnormal; };
}

struct Unary {
  const char* name;
  Tensor (*op)(const Tensor&);
  double (*f)(double);
  bool positive;
};
double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
const Unary kUnary[] = {{"exp", raw::exp, [](double x) { return std::exp(x); }, false},
                        {"log", raw::log, [](double x) { return std::log(x); }, true},
                        {"sqrt", raw::sqrt, [](double x) { return std::sqrt(x); }, true},
                        {"rsqrt", raw::rsqrt, [](double x) { return 1 / std::sqrt(x); }, true},
                        {"tanh", raw::tanh, [](double x) { return std::tanh(x); }, false},
                        {"relu", raw::relu, [](double x) { return x > 0 ? x : 0; }, false},
                        {"gelu", raw::gelu, gelu, false},
                        {"silu", raw::silu, [](double x) { return x * sigmoid(x); }, false},
                        {"sigmoid", raw::sigmoid, sigmoid, false}};

double arithmetic(Binary op, double a, double b, DType dtype) {
  const bool integer = !is_floating(dtype);
  switch (op) {
    case Binary::add:
      return a + b;
    case Binary::sub:
      return a - b;
    case Binary::mul:
      return a * b;
    case Binary::div:
      return integer ? (b == 0 ? 0 : std::trunc(a / b)) : a / b;
    case Binary::min:
      return std::min(a, b);
    case Binary::max:
      return std::max(a, b);
    case Binary::eq:
      return a == b;
    case Binary::ne:
      return a != b;
    case Binary::lt:
      return a < b;
    case Binary::le:
      return a <= b;
    case Binary::gt:
      return a > b;
    case Binary::ge:
      return a >= b;
    case Binary::logical_and:
      return a != 0 && b != 0;
    case Binary::logical_or:
      return a != 0 || b != 0;
    default:
      return std::nan("");
  }
}
constexpr Binary kArithmetic[] = {Binary::add, Binary::sub, Binary::mul,
                                  Binary::div, Binary::min, Binary::max};
constexpr Binary kComparisons[] = {Binary::eq, Binary::ne, Binary::lt,          Binary::le,
                                   Binary::gt, Binary::ge, Binary::logical_and, Binary::logical_or};

// One rounding of the exact result: IEEE division and the others are correctly rounded, in f32 for
// 16 bits.
std::function<double(double)> one_rounding(DType dtype) {
  const double u = dtype == f64 ? 0x1p-53 : 0x1p-24;
  return [=](double v) {
    return (1.01 * unit_roundoff(dtype) + u) * std::abs(v) + (dtype == f16 ? 0x1p-25 : 0);
  };
}

void check_binary(Binary op, const Pair& a, const Pair& b, DType dtype) {
  const bool compares = op >= Binary::eq;
  const Host expected = Host::build(broadcast(a.host.shape, b.host.shape), [&](const Shape& at) {
    return arithmetic(op, a.host.spread(at), b.host.spread(at), dtype);
  });
  check_values(raw::binary(op, a.tensor, b.tensor), compares ? boolean : dtype, expected,
               is_floating(dtype) && !compares ? one_rounding(dtype) : nullptr);
}

}  // namespace

TEST_CASE("functions of one tensor") {
  const Device device = any_device();
  Draw draw;
  GridShare share;
  std::vector<View> views = same_shape_views();
  for (const View& v : odd_views()) views.push_back(v);
  for (const View& view : views)
    for (const DType dtype : kFloating) {
      if (!share.takes()) continue;
      INFO(view.name << ", " << dtype << ", seed " << draw.seed);
      const Pair x = draw(view, dtype, device);
      // 0.5 + |x| for the functions that want it positive; computed on the host.
      Host positive = x.host;
      for (double& v : positive.values) v = rounded(0.5 + std::abs(v), dtype);
      const Tensor above = to_device(positive, dtype, device);
      for (const Unary& op : kUnary) {
        INFO(op.name);
        const Host& in = op.positive ? positive : x.host;
        check_values(op.op(op.positive ? above : x.tensor), dtype,
                     Host::build(in.shape, [&](const Shape& at) { return op.f(in.at(at)); }),
                     few_roundings(dtype));
      }
    }
}

TEST_CASE("neg, abs, logical_not and isfinite") {
  const Device device = any_device();
  Draw draw;
  for (const View& view : same_shape_views())
    for (const DType dtype : kAll) {
      INFO(view.name << ", " << dtype << ", seed " << draw.seed);
      const Pair x = draw(view, dtype, device);
      const auto each = [&](double (*f)(double)) {
        return Host::build(x.host.shape, [&](const Shape& at) { return f(x.host.at(at)); });
      };
      check_values(raw::logical_not(x.tensor), boolean,
                   each([](double v) { return v == 0 ? 1. : 0.; }));
      if (dtype == boolean) continue;
      check_values(raw::neg(x.tensor), dtype, each([](double v) { return -v; }));
      check_values(raw::abs(x.tensor), dtype, each([](double v) { return std::abs(v); }));
    }
  const double inf = INFINITY;
  const Tensor x = to_device({{4}, {1, inf, -inf, std::nan("")}}, f32, device);
  check_values(raw::isfinite(x), boolean, {{4}, {1, 0, 0, 0}});
}

TEST_CASE("functions of two tensors, in every pair of layouts") {
  const Device device = any_device();
  Draw draw;
  const DType dtype = GENERATE(f32, f64, bf16, f16, i32, i64);
  for (const View& left : same_shape_views())
    for (const View& right : same_shape_views()) {
      INFO(left.name << " and " << right.name << ", " << dtype << ", seed " << draw.seed);
      const Pair a = draw(left, dtype, device), b = draw(right, dtype, device);
      for (const Binary op : kArithmetic) check_binary(op, a, b, dtype);
      if (left.name == "contiguous")
        for (const Binary op : kComparisons) check_binary(op, a, b, dtype);
    }
}

TEST_CASE("functions of two tensors that broadcast, and of odd shapes") {
  const Device device = any_device();
  Draw draw;
  const std::pair<View, View> pairs[] = {
      {{"", {2, 3}, {}}, {"", {3}, {}}},
      {{"", {4, 1}, {}}, {"", {2, 1, 3}, {}}},
      {{"", {}, {}}, {"", {3, 2}, {}}},
      {{"", {1, 3}, {}}, {"", {0, 1}, {}}},
      {odd_views()[4],
       {"", {2, 2, 2, 3, 3}, {}}},  // walks that need more dimensions than a kernel has
      {odd_views()[5], odd_views()[5]},
      {odd_views()[6], {"", {3, 1}, {}}}};
  for (const auto& [left, right] : pairs)
    for (const DType dtype : {f32, bf16, i64}) {
      INFO(left.base << " and " << right.base << ", " << dtype << ", seed " << draw.seed);
      const Pair a = draw(left, dtype, device), b = draw(right, dtype, device);
      for (const Binary op : {Binary::add, Binary::sub, Binary::lt}) {
        check_binary(op, a, b, dtype);
        check_binary(op, b, a, dtype);
      }
    }
  const Pair a = draw({2, 3}, boolean, device), b = draw({3}, boolean, device);
  for (const Binary op :
       {Binary::min, Binary::max, Binary::eq, Binary::ne, Binary::logical_and, Binary::logical_or})
    check_binary(op, a, b, boolean);
}

TEST_CASE("functions of a tensor and a number, on either side") {
  const Device device = any_device();
  Draw draw;
  GridShare share;
  std::vector<View> views = same_shape_views();
  for (const View& v : odd_views()) views.push_back(v);
  for (const View& view : views)
    for (const DType dtype : {f32, f64, bf16, i32}) {
      if (!share.takes()) continue;
      INFO(view.name << ", " << dtype << ", seed " << draw.seed);
      const Pair x = draw(view, dtype, device);
      for (const Binary op : {Binary::sub, Binary::mul, Binary::div, Binary::max, Binary::ge}) {
        const bool compares = op == Binary::ge;
        const auto tolerance = is_floating(dtype) && !compares ? one_rounding(dtype) : nullptr;
        const auto each = [&](auto f) {
          return Host::build(x.host.shape, [&](const Shape& at) { return f(x.host.at(at)); });
        };
        check_values(raw::binary(op, x.tensor, 3.0), compares ? boolean : dtype,
                     each([&](double v) { return arithmetic(op, v, 3, dtype); }), tolerance);
        check_values(raw::binary(op, 3.0, x.tensor), compares ? boolean : dtype,
                     each([&](double v) { return arithmetic(op, 3, v, dtype); }), tolerance);
      }
    }
}

TEST_CASE("where takes from either branch, over layouts") {
  const Device device = any_device();
  Draw draw;
  const auto check = [&](const View& c, const View& a, const View& b, DType dtype) {
    INFO(c.name << c.base << ", " << a.name << a.base << ", " << b.name << b.base << ", " << dtype
                << ", seed " << draw.seed);
    const Pair condition = draw(c, boolean, device), x = draw(a, dtype, device),
               y = draw(b, dtype, device);
    const Shape shape = broadcast(condition.host.shape, broadcast(x.host.shape, y.host.shape));
    check_values(raw::where(condition.tensor, x.tensor, y.tensor), dtype,
                 Host::build(shape, [&](const Shape& at) {
                   return condition.host.spread(at) != 0 ? x.host.spread(at) : y.host.spread(at);
                 }));
  };
  const std::vector<View> views = same_shape_views();
  for (const View& c : views)
    for (const DType dtype : kAll) check(c, views[1], views[3], dtype);
  for (const View& a : views) check(views[2], a, {"", {4}, {}}, f32);
  check({"", {}, {}}, {"", {2, 1}, {}}, {"", {3}, {}}, f32);
  check({"", {0, 3}, {}}, {"", {3}, {}}, {"", {}, {}}, f32);
  check({"", {}, {}}, {"", {}, {}}, {"", {}, {}}, f16);
  check(odd_views()[4], odd_views()[4], {"", {2, 2, 2, 3, 3}, {}}, f32);
}

TEST_CASE("axpby adds in place, over layouts and dtypes") {
  const Device device = any_device();
  Draw draw;
  std::vector<View> views = same_shape_views();
  for (const View& v : odd_views()) views.push_back(v);
  for (const View& view : views)
    for (const auto& [to, from] : {std::pair{f32, f32}, {f32, bf16}, {f64, f32}, {bf16, f32}}) {
      INFO(view.name << ", " << to << " += " << from << ", seed " << draw.seed);
      const Pair x = draw(view, from, device);
      Host y = x.host;
      for (double& v : y.values) v = rounded(v * 3 + 1, to);
      const Tensor out = to_device(y, to, device);
      raw::axpby(out, x.tensor, 0.5, 2);
      const auto expected =
          Host::build(y.shape, [&](const Shape& at) { return 0.5 * x.host.at(at) + 2 * y.at(at); });
      // Two products, a sum and the same in the reference, then one rounding. 0.5 x and 2 y have
      // other signs where 3 x is in (-1, 0) only, so their sizes sum to at most |v| + 1.
      const auto tolerance = [to = to](double v) {
        return 1.01 * unit_roundoff(to) * std::abs(v) +
               6 * unit_roundoff(to == f64 ? f64 : f32) * (1 + std::abs(v));
      };
      check_values(out, to, expected, tolerance);
      const Tensor fresh = Tensor::full(y.shape, NAN, to, device);
      raw::axpby(fresh, x.tensor, 1, 0);  // never reads what was there
      check_values(fresh, to, Host::build(y.shape, [&, to = to](const Shape& at) {
                     return rounded(x.host.at(at), to);
                   }));
    }
}

TEST_CASE("casts round to nearest, truncate to integers and compare with zero") {
  const Device device = any_device();
  Draw draw;
  for (const View& view : same_shape_views())
    for (const DType from : kAll)
      for (const DType to : kAll) {
        INFO(view.name << ", " << from << " to " << to << ", seed " << draw.seed);
        const Pair x = draw(view, from, device);
        check_values(raw::cast(x.tensor, to), to, Host::build(x.host.shape, [&](const Shape& at) {
                       const double v = x.host.at(at);
                       return to == boolean ? (v != 0 ? 1. : 0.) : rounded(v, to);
                     }));
      }
}

TEST_CASE("copy_into and fill write views and nothing beside them") {
  const Device device = any_device();
  Draw draw;
  for (const View& view : same_shape_views()) {
    if (view.name.starts_with("broadcast")) continue;  // several positions are one element there
    for (const DType dtype : kAll) {
      INFO(view.name << ", " << dtype << ", seed " << draw.seed);
      const Pair x = draw({2, 3, 4}, f32, device);
      const Tensor base = to_device(Host::make(view.base), dtype, device);
      Tensor out = base;
      for (const Step& step : view.steps) out = apply(out, step);
      raw::fill(out, 1);
      double written = 0;
      for (const double v : to_host(base).values) written += v;
      CHECK(written == 24);
      raw::copy_into(out, x.tensor);
      check_values(out, dtype, Host::build(x.host.shape, [&](const Shape& at) {
                     const double v = x.host.at(at);
                     return dtype == boolean ? (v != 0 ? 1. : 0.) : rounded(v, dtype);
                   }));
    }
  }
  CHECK_THROWS_WITH(
      raw::copy_into(Tensor::zeros({2}, f32, device), Tensor::zeros({3}, f32, device)),
      Catch::Contains("[2]") && Catch::Contains("[3]"));
}

TEST_CASE("swiglu over rows of any layout") {
  const Device device = any_device();
  Draw draw;
  std::vector<View> views = same_shape_views();
  views.push_back(odd_views()[3]);
  views.push_back(odd_views()[2]);
  for (const View& view : views)
    for (const DType dtype : kFloating) {
      INFO(view.name << ", " << dtype << ", seed " << draw.seed);
      const Pair gate = draw(view, dtype, device), up = draw(view, dtype, device);
      check_values(raw::swiglu(gate.tensor, up.tensor), dtype,
                   Host::build(gate.host.shape,
                               [&](const Shape& at) {
                                 const double g = gate.host.at(at);
                                 return g * sigmoid(g) * up.host.at(at);
                               }),
                   [&](double v) { return kLargest * few_roundings(dtype)(v); });  // |up| at most
    }
}

TEST_CASE("a number that integers can't hold is refused beside them, and to fill them",
          "[tensor]") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  for (const DType dtype : {i32, i64}) {
    const Tensor x = Tensor::arange(3, dtype, device);
    for (const double s : {0.5, double{NAN}, double{INFINITY}, -1e20, 1e20}) {
      INFO(dtype << " and " << s);
      const auto says = s == 0.5 || std::isnan(s) ? "no whole number" : "is beyond";
      CHECK_THROWS_WITH(raw::mul(x, s), Contains(says));
      CHECK_THROWS_WITH(raw::binary(Binary::sub, s, x), Contains(says));
      CHECK_THROWS_WITH(raw::fill(x, s), Contains("fill") && Contains(says));
      CHECK_THROWS_WITH(Tensor::full({2}, s, dtype, device), Contains(says));
    }
    CHECK_NOTHROW(raw::fill(x, dtype == i32 ? -0x1p31 : -0x1p63));
    CHECK_THROWS_AS(raw::fill(x, dtype == i32 ? 0x1p31 : 0x1p63), ContractError);
  }
  CHECK(Tensor::full({1}, 0x1p31 - 1, i32, device).to_vector<std::int32_t>()[0] == 2147483647);
  CHECK_THROWS_AS(Tensor::full({2}, 0.5, boolean, device), ContractError);
}

TEST_CASE("what no kernel computes on integers or booleans is refused, by name", "[tensor]") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor whole = Tensor::arange(3, i32, device), flags = Tensor::ones({3}, boolean, device);
  for (const Binary op : {Binary::pow, Binary::gelu_backward, Binary::tanh_backward})
    for (const Tensor& x : {whole, flags}) {
      const std::string says = std::string(name(op)) + ": the operands are " +
                               std::string(name(x.dtype())) + ", expected a floating dtype";
      CHECK_THROWS_WITH(raw::binary(op, x, x), Contains(says));
      CHECK_THROWS_WITH(raw::binary(op, x, 2.0), Contains(says));
      CHECK_THROWS_WITH(raw::binary(op, 2.0, x), Contains(says));
    }
  for (const Binary op : {Binary::add, Binary::sub, Binary::mul, Binary::div})
    CHECK_THROWS_WITH(raw::binary(op, flags, flags),
                      Contains(name(op)) && Contains("bool, expected numbers"));
  CHECK_THROWS_WITH(raw::neg(flags), Contains("neg: the tensor is bool"));
  CHECK(raw::binary(Binary::max, flags, flags).dtype() == boolean);
  CHECK(raw::binary(Binary::div, raw::add(whole, whole), 1.0).to_vector<std::int32_t>() ==
        std::vector<std::int32_t>{0, 2, 4});
}
