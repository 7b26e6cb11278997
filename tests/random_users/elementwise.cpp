// Operations of random expressions that see single elements: their formulas as the library has
// them, since a bound follows from the formula.
#include <numbers>

#include "tessera/autograd/ops.hpp"
#include "tests/random_users/expression.hpp"

namespace tessera::testing {
namespace {

struct Unary {
  const char* name;
  Tensor (*run)(const Tensor&);
  Number (*value)(Number x);
  Number (*slope)(Number g, Number x);  // g times the derivative
  double low = -4, high = 4;            // of what is given
  bool of_integers = false;
};

Number softplus(Number x) { return max(x, exact(0, x.dtype)) + log1p(exp(-abs(x))); }
// In x sigmoid(w(x)), gelu's w and its derivative.
constexpr double kLinear = 2 * 0.7978845608028654, kCubic = kLinear * 0.044715;
Number gelu_share(Number x) { return sigmoid(x * (x * x * kCubic + kLinear)); }
Number root(Number x) { return sqrt(x); }
// Where no step lies within what is known of x.
Number step(Number x, double (*f)(double)) {
  need(f(x.low()) == f(x.high()));
  return exact(f(x.value), x.dtype);
}
Number flat(Number g, Number) { return exact(0, g.dtype); }
// Exact moves of x: a kink there is one at 0 here.
Number moved(Number x, double by) { return {x.value + by, x.error, x.dtype}; }

constexpr double kMost = 1000;  // of what has no domain of its own

const Unary kUnary[] = {
    {"exp", [](const Tensor& x) { return exp(x); }, exp,
     [](Number g, Number x) { return g * exp(x); }},
    {"log", [](const Tensor& x) { return log(x); }, log, [](Number g, Number x) { return g / x; },
     0.1, kMost},
    {"sqrt", [](const Tensor& x) { return sqrt(x); }, root,
     [](Number g, Number x) { return g / sqrt(x) * 0.5; }, 0.1, kMost},
    {"rsqrt", [](const Tensor& x) { return rsqrt(x); }, [](Number x) { return 1 / sqrt(x); },
     [](Number g, Number x) {
       const Number y = 1 / sqrt(x);
       return g * y * (y * y * -0.5);
     },
     0.1, kMost},
    {"sin", [](const Tensor& x) { return sin(x); }, sin,
     [](Number g, Number x) { return g * cos(x); }},
    {"tanh", [](const Tensor& x) { return tanh(x); }, tanh,
     [](Number g, Number x) { return g * (1 - tanh(x) * tanh(x)); }, -kMost, kMost},
    {"erf", [](const Tensor& x) { return erf(x); }, erf,
     [](Number g, Number x) { return g * (exp(-(x * x)) * 2. * std::numbers::inv_sqrtpi); }},
    {"square", [](const Tensor& x) { return square(x); }, [](Number x) { return x * x; },
     [](Number g, Number x) { return g * x + g * x; }, -kMost, kMost, true},
    {"abs", [](const Tensor& x) { return abs(x); }, abs,
     [](Number g, Number x) { return g * side(x, -1, 0, 1); }, -kMost, kMost, true},
    {"floor", [](const Tensor& x) { return floor(x); },
     [](Number x) { return step(x, std::floor); }, flat, -kMost, kMost, true},
    {"relu", [](const Tensor& x) { return relu(x); },
     [](Number x) { return max(x, exact(0, x.dtype)); },
     [](Number g, Number x) { return g * side(x, 0, 0, 1); }, -kMost, kMost},
    {"elu", [](const Tensor& x) { return elu(x, 0.5); },
     [](Number x) {
       const Number zero = exact(0, x.dtype);
       return max(x, zero) + expm1(min(x, zero)) * 0.5;
     },
     [](Number g, Number x) {
       const Number below = (expm1(min(x, exact(0, x.dtype))) + 1) * 0.5, share = side(x, 0, 0, 1);
       return g * (below * (1 - share) + share);
     }},
    {"gelu", [](const Tensor& x) { return gelu(x); }, [](Number x) { return x * gelu_share(x); },
     [](Number g, Number x) {
       const Number s = gelu_share(x);
       return g * (s * (x * (1 - s) * (x * x * (3 * kCubic) + kLinear) + 1));
     }},
    {"sigmoid", [](const Tensor& x) { return sigmoid(x); }, sigmoid,
     [](Number g, Number x) { return g * (sigmoid(x) * (1 - sigmoid(x))); }, -kMost, kMost},
    {"softplus", [](const Tensor& x) { return tessera::softplus(x); }, softplus,
     [](Number g, Number x) { return g * sigmoid(x); }, -kMost, kMost},
    {"silu", [](const Tensor& x) { return silu(x); }, [](Number x) { return x * sigmoid(x); },
     [](Number g, Number x) {
       const Number s = sigmoid(x);
       return g * (s * (x * (1 - s) + 1));
     }},
    {"clamp", [](const Tensor& x) { return clamp(x, -0.5, 1); },
     [](Number x) { return min(max(x, exact(-0.5, x.dtype)), exact(1, x.dtype)); },
     [](Number g, Number x) {
       return g * side(moved(x, 0.5), 0, 1, 1) * side(moved(x, -1), 1, 1, 0);
     },
     -kMost, kMost},
    {"pow_3", [](const Tensor& x) { return pow(x, 3.); },
     [](Number x) { return pow(x, exact(3, x.dtype)); },
     [](Number g, Number x) { return g * (pow(x, exact(2, x.dtype)) * 3.); }, 0.2},
    {"neg", [](const Tensor& x) { return -x; }, [](Number x) { return -x; },
     [](Number g, Number) { return -g; }, -kMost, kMost, true},
    {"plus_2", [](const Tensor& x) { return 2 + x; }, [](Number x) { return x + 2; },
     [](Number g, Number) { return g; }, -kMost, kMost, true},
    {"3_minus", [](const Tensor& x) { return 3 - x; }, [](Number x) { return 3 - x; },
     [](Number g, Number) { return -g; }, -kMost, kMost, true},
    {"times_-2", [](const Tensor& x) { return x * -2; }, [](Number x) { return x * -2; },
     [](Number g, Number) { return g * -2; }, -kMost, kMost, true},
    {"over_3", [](const Tensor& x) { return x / 3; }, [](Number x) { return x / 3; },
     [](Number g, Number) { return g / 3; }, -kMost, kMost, true},
    {"3_over", [](const Tensor& x) { return 3 / x; }, [](Number x) { return 3 / x; },
     [](Number g, Number x) { return g * (-3 / (x * x)); }, 0.1, kMost}};

struct Binary {
  const char* name;
  Tensor (*run)(const Tensor&, const Tensor&);
  Number (*value)(Number a, Number b);
  Number (*slope_a)(Number g, Number a, Number b);
  Number (*slope_b)(Number g, Number a, Number b);
  double low_a = -kMost, low_b = -kMost;
  bool of_integers = false;
};

Number difference_side(Number a, Number b, double below, double at, double above) {
  return side({a.value - b.value, a.error + b.error, a.dtype}, below, at, above);
}

const Binary kBinary[] = {
    {"add", [](const Tensor& a, const Tensor& b) { return a + b; },
     [](Number a, Number b) { return a + b; }, [](Number g, Number, Number) { return g; },
     [](Number g, Number, Number) { return g; }, -kMost, -kMost, true},
    {"sub", [](const Tensor& a, const Tensor& b) { return a - b; },
     [](Number a, Number b) { return a - b; }, [](Number g, Number, Number) { return g; },
     [](Number g, Number, Number) { return -g; }, -kMost, -kMost, true},
    {"mul", [](const Tensor& a, const Tensor& b) { return a * b; },
     [](Number a, Number b) { return a * b; }, [](Number g, Number, Number b) { return g * b; },
     [](Number g, Number a, Number) { return g * a; }, -kMost, -kMost, true},
    {"div", [](const Tensor& a, const Tensor& b) { return a / b; },
     [](Number a, Number b) { return a / b; }, [](Number g, Number, Number b) { return g / b; },
     [](Number g, Number a, Number b) { return -(g / b * (a / b)); }, -kMost, 0.1, true},
    {"pow", [](const Tensor& a, const Tensor& b) { return pow(a, b); },
     [](Number a, Number b) { return pow(a, b); },
     [](Number g, Number a, Number b) {
       return b.is_exact() && b.value == 0 ? exact(0, g.dtype) : g * (b * pow(a, b - 1));
     },
     [](Number g, Number a, Number b) { return g * (pow(a, b) * log(a)); }, 0.2},
    {"minimum", [](const Tensor& a, const Tensor& b) { return minimum(a, b); },
     [](Number a, Number b) { return min(a, b); },
     [](Number g, Number a, Number b) { return g * difference_side(a, b, 1, 0.5, 0); },
     [](Number g, Number a, Number b) { return g * difference_side(a, b, 0, 0.5, 1); }, -kMost,
     -kMost, true},
    {"maximum", [](const Tensor& a, const Tensor& b) { return maximum(a, b); },
     [](Number a, Number b) { return max(a, b); },
     [](Number g, Number a, Number b) { return g * difference_side(a, b, 0, 0.5, 1); },
     [](Number g, Number a, Number b) { return g * difference_side(a, b, 1, 0.5, 0); }, -kMost,
     -kMost, true}};

// A shape that broadcasts with `shape` to it.
Shape partner(Draw& draw, const Shape& shape) {
  Shape out;
  const int skipped = draw.chance(0.3) ? draw.number(0, shape.ndim()) : 0;
  for (int d = skipped; d < shape.ndim(); ++d) out.push_back(draw.chance(0.25) ? 1 : shape[d]);
  return out;
}

bool broadcasts(const Shape& a, const Shape& b) {
  for (int d = 1; d <= std::min(a.ndim(), b.ndim()); ++d) {
    const std::int64_t x = a[a.ndim() - d], y = b[b.ndim() - d];
    if (x != y && x != 1 && y != 1) return false;
  }
  return true;
}

// Another line that broadcasts with x, or a new one.
std::size_t operand_beside(Draw& draw, Expression& e, std::size_t x) {
  std::vector<std::size_t> fit;
  for (std::size_t i = 0; i < e.lines.size(); ++i)
    if (e[i].dtype == e[x].dtype && broadcasts(e[i].shape, e[x].shape)) fit.push_back(i);
  if (draw.chance(0.6)) return draw.one_of(fit);  // x itself, at least
  return add_input(draw, e, partner(draw, e[x].shape), e[x].dtype);
}

}  // namespace

std::size_t add_unary(Draw& draw, Expression& e, std::size_t x) {
  const Unary& op = draw.one_of(kUnary);
  const Line& in = e[x];
  need(in.dtype != boolean && (is_floating(in.dtype) || op.of_integers));
  Line line{.text = op.name,
            .operands = {x},
            .run = [&op](auto v) { return op.run(v[0]); },
            .shape = in.shape,
            .dtype = in.dtype};
  for (const Number v : in.values) {
    need(v.low() >= op.low && v.high() <= op.high);
    line.values.push_back(op.value(v));
  }
  line.adjoint = [&op, values = in.values](const Numbers& g, auto to) {
    for (std::size_t i = 0; i < g.size(); ++i) to[0][i].add(op.slope(g[i], values[i]));
  };
  return e.add(std::move(line));
}

std::size_t add_binary(Draw& draw, Expression& e, std::size_t x) {
  const Binary& op = draw.one_of(kBinary);
  need(e[x].dtype != boolean && (is_floating(e[x].dtype) || op.of_integers));
  std::size_t y = operand_beside(draw, e, x);
  if (draw.chance(0.3)) std::swap(x, y);
  const Line &a = e[x], &b = e[y];
  Line line{.text = op.name,
            .operands = {x, y},
            .run = [&op](auto v) { return op.run(v[0], v[1]); },
            .shape = broadcast(a.shape, b.shape),
            .dtype = a.dtype};
  std::vector<std::pair<std::size_t, std::size_t>> from;
  for_each_place(line.shape, [&](const Shape& place) {
    from.emplace_back(spread_index(a.shape, place), spread_index(b.shape, place));
    const Number u = a.values[from.back().first], v = b.values[from.back().second];
    need(u.low() >= op.low_a && v.low() >= op.low_b);
    line.values.push_back(op.value(u, v));
  });
  line.adjoint = [&op, from, of_a = a.values, of_b = b.values](const Numbers& g, auto to) {
    for (std::size_t i = 0; i < g.size(); ++i) {
      const auto [k, l] = from[i];
      to[0][k].add(op.slope_a(g[i], of_a[k], of_b[l]));
      to[1][l].add(op.slope_b(g[i], of_a[k], of_b[l]));
    }
  };
  return e.add(std::move(line));
}

std::size_t add_cast(Draw& draw, Expression& e, std::size_t x) {
  constexpr DType kTo[] = {f64, f32, bf16, f16, i32, i64};
  const DType dtype = draw.one_of(kTo);
  const Line& in = e[x];
  const auto converted = [](Number v, DType to) {
    if (v.is_exact()) return exact(kernel_test::rounded_to(to, v.value), to);
    if (!is_floating(to)) {
      need(std::trunc(v.low()) == std::trunc(v.high()));
      return exact(std::trunc(v.value), to);
    }
    return rounded(v.value, v.error, to);
  };
  Line line{.text = concat("cast ", dtype),
            .operands = {x},
            .run = [dtype](auto v) { return cast(v[0], dtype); },
            .shape = in.shape,
            .dtype = dtype};
  for (const Number v : in.values) line.values.push_back(converted(v, dtype));
  if (is_floating(dtype) && is_floating(in.dtype))
    line.adjoint = [converted, to_dtype = in.dtype](const Numbers& g, auto to) {
      for (std::size_t i = 0; i < g.size(); ++i) to[0][i].add(converted(g[i], to_dtype));
    };
  return e.add(std::move(line));
}

}  // namespace tessera::testing
