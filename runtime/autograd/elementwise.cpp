// Derivatives of arithmetic and of functions of single elements. What needs no kernel of its own is
// written with those that do.
#include "tessera/autograd/elementwise.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/autograd/fp8_input.hpp"
#include "runtime/autograd/gradient_sink.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::record;
using autograd::Saved;
using raw::Binary;
using raw::sum_to;
using raw::Unary;

namespace {

Tensor scalar_like(const Tensor& x, double value) {
  return Tensor::full({}, value, x.dtype(), x.device());
}

// g, but 0 where `mask` is true.
Tensor zero_where(const Tensor& mask, const Tensor& g) {
  return raw::where(mask, scalar_like(g, 0), g);
}

// y = op(x), whose derivative takes the operand or the result, and the gradient.
enum class Keeps { operand, result };
using Slope = Tensor (*)(const Tensor& kept, const Tensor& g);
Tensor function(Unary op, const Tensor& x, Keeps keeps, Slope slope) {
  Tensor y = raw::unary(op, x);
  return record(kernels::name(op), {x}, y,
                [kept = Saved(keeps == Keeps::operand ? x : y), slope](
                    const Tensor& g, Gradients& out) { out.set(0, slope(kept.get(), g)); });
}
template <Binary op>
Tensor slope_of(const Tensor& kept, const Tensor& g) {
  return raw::binary(op, kept, g);
}

// silu(gate) up, or its codes.
Tensor gated(const Tensor& gate, const Tensor& up, const InputForm& form) {
  if (!form) return raw::swiglu(gate, up);
  autograd::expect_rounded("swiglu", gate);
  return autograd::rounded_input(detail::SwigluOf{gate, up}, gate.shape(), *form.recipe());
}

// The gradient of input i, of `shape`, from that of a sum. Where it was broadcast along leading
// dimensions, as a bias and positions are, its sums go straight to its sink.
void set_summed(Gradients& out, int i, const Tensor& g, const Shape& shape) {
  if (!out.wants(i)) return;
  const bool lacks_dimensions =
      shape.ndim() < g.ndim() && g.numel() > 0 &&
      std::equal(shape.begin(), shape.end(), g.shape().end() - shape.ndim());
  const auto sink = lacks_dimensions ? out.sink(i) : std::nullopt;
  if (!sink) return out.set(i, sum_to(g, shape));
  if (!sink->tensor.is_contiguous() || !autograd::can_write(*sink, g.dtype()))
    return autograd::write(*sink, sum_to(g, shape));
  const std::int64_t columns = shape.numel();
  raw::sum_rows_into(raw::reshape(sink->tensor, {columns}),
                     raw::reshape(raw::contiguous(g), {g.numel() / columns, columns}), sink->scale,
                     sink->accumulate ? raw::Accumulate::yes : raw::Accumulate::no);
}

// A tensor in the expressions of unary.def, where each operator is a kernel.
struct Value {
  Tensor tensor;
};
Value operator-(const Value& x) { return {raw::neg(x.tensor)}; }
Value operator*(const Value& a, const Value& b) { return {raw::mul(a.tensor, b.tensor)}; }
Value operator*(const Value& a, double b) { return {raw::mul(a.tensor, b)}; }
Value operator/(const Value& a, const Value& b) {
  return {raw::binary(Binary::div, a.tensor, b.tensor)};
}
Value operator+(const Value& a, double b) { return {raw::binary(Binary::add, a.tensor, b)}; }
Value exp(const Value& x) { return {raw::exp(x.tensor)}; }
Value sin(const Value& x) { return {raw::unary(Unary::sin, x.tensor)}; }
Value cos(const Value& x) { return {raw::unary(Unary::cos, x.tensor)}; }
Value sign(const Value& x) { return {raw::unary(Unary::sign, x.tensor)}; }
Value sigmoid(const Value& x) { return {raw::sigmoid(x.tensor)}; }

// A function of steps.
Tensor steps(Unary op, const Tensor& x) {
  return record(kernels::name(op), {x}, raw::unary(op, x), [](const Tensor& g, Gradients& out) {
    out.set(0, Tensor::zeros(g.shape(), g.dtype(), g.device()));
  });
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("add", at);
  return record("add", {a, b}, raw::add(a, b),
                [sa = a.shape(), sb = b.shape()](const Tensor& g, Gradients& out) {
                  set_summed(out, 0, g, sa);
                  set_summed(out, 1, g, sb);
                });
}

Tensor sub(const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("sub", at);
  return record("sub", {a, b}, raw::binary(Binary::sub, a, b),
                [sa = a.shape(), sb = b.shape()](const Tensor& g, Gradients& out) {
                  if (out.wants(0)) out.set(0, sum_to(g, sa));
                  if (out.wants(1)) out.set(1, raw::neg(sum_to(g, sb)));
                });
}

Tensor mul(const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("mul", at);
  return record("mul", {a, b}, raw::mul(a, b),
                [a = Saved(a), b = Saved(b)](const Tensor& g, Gradients& out) {
                  if (out.wants(0)) out.set(0, sum_to(raw::mul(g, b.get()), a.get().shape()));
                  if (out.wants(1)) out.set(1, sum_to(raw::mul(g, a.get()), b.get().shape()));
                });
}

Tensor div(const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("div", at);
  return record("div", {a, b}, raw::binary(Binary::div, a, b),
                [a = Saved(a), b = Saved(b)](const Tensor& g, Gradients& out) {
                  const Tensor scaled = raw::binary(Binary::div, g, b.get());
                  if (out.wants(0)) out.set(0, sum_to(scaled, a.get().shape()));
                  if (out.wants(1)) {
                    const Tensor quotient = raw::binary(Binary::div, a.get(), b.get());
                    out.set(1, raw::neg(sum_to(raw::mul(scaled, quotient), b.get().shape())));
                  }
                });
}

Tensor add(const Tensor& a, double b, Caller at) {
  const CallSite site("add", at);
  return record("add", {a}, raw::binary(Binary::add, a, b),
                [](const Tensor& g, Gradients& out) { out.set(0, g); });
}
Tensor mul(const Tensor& a, double b, Caller at) {
  const CallSite site("mul", at);
  return record("mul", {a}, raw::mul(a, b),
                [b](const Tensor& g, Gradients& out) { out.set(0, raw::mul(g, b)); });
}
Tensor sub(double a, const Tensor& b, Caller at) {
  const CallSite site("sub", at);
  return record("sub", {b}, raw::binary(Binary::sub, a, b),
                [](const Tensor& g, Gradients& out) { out.set(0, raw::neg(g)); });
}
Tensor div(double a, const Tensor& b, Caller at) {
  const CallSite site("div", at);
  return record("div", {b}, raw::binary(Binary::div, a, b),
                [a, b = Saved(b)](const Tensor& g, Gradients& out) {
                  const Tensor slope = raw::binary(Binary::div, -a, raw::mul(b.get(), b.get()));
                  out.set(0, raw::mul(g, slope));
                });
}
Tensor div(const Tensor& a, double b, Caller at) {
  const CallSite site("div", at);
  return record("div", {a}, raw::binary(Binary::div, a, b), [b](const Tensor& g, Gradients& out) {
    out.set(0, raw::binary(Binary::div, g, b));
  });
}
Tensor neg(const Tensor& x, Caller at) {
  const CallSite site("neg", at);
  return record("neg", {x}, raw::neg(x),
                [](const Tensor& g, Gradients& out) { out.set(0, raw::neg(g)); });
}

Tensor pow(const Tensor& x, const Tensor& y, Caller at) {
  const CallSite site("pow", at);
  Tensor z = raw::binary(Binary::pow, x, y);
  return record("pow", {x, y}, z,
                [x = Saved(x), y = Saved(y), z = Saved(z)](const Tensor& g, Gradients& out) {
                  if (out.wants(0)) {  // y x^(y - 1)
                    const Tensor power =
                        raw::binary(Binary::pow, x.get(), raw::binary(Binary::sub, y.get(), 1));
                    const Tensor dx = raw::mul(g, raw::mul(y.get(), power));
                    out.set(0, sum_to(zero_where(y.get() == 0, dx), x.get().shape()));
                  }
                  if (out.wants(1)) {  // log(x) x^y
                    const Tensor dy = raw::mul(g, raw::mul(z.get(), raw::log(x.get())));
                    const Tensor is_flat = logical_and(x.get() == 0, y.get() >= 0);
                    out.set(1, sum_to(zero_where(is_flat, dy), y.get().shape()));
                  }
                });
}
Tensor pow(const Tensor& x, double y, Caller at) {
  const CallSite site("pow", at);
  return record("pow", {x}, raw::binary(Binary::pow, x, y),
                [x = Saved(x), y](const Tensor& g, Gradients& out) {
                  if (y == 0) return out.set(0, Tensor::zeros(g.shape(), g.dtype(), g.device()));
                  const Tensor power = raw::binary(Binary::pow, x.get(), y - 1);
                  out.set(0, raw::mul(g, raw::mul(power, y)));
                });
}
Tensor pow(double x, const Tensor& y, Caller at) {
  const CallSite site("pow", at);
  Tensor z = raw::binary(Binary::pow, x, y);
  return record("pow", {y}, z, [x, y = Saved(y), z = Saved(z)](const Tensor& g, Gradients& out) {
    const Tensor dy = raw::mul(g, raw::mul(z.get(), std::log(x)));
    out.set(0, x == 0 ? zero_where(y.get() >= 0, dy) : dy);
  });
}
Tensor square(const Tensor& x, Caller at) {
  const CallSite site("square", at);
  return mul(x, x);
}
Tensor reciprocal(const Tensor& x, Caller at) {
  const CallSite site("reciprocal", at);
  TESSERA_EXPECT(is_floating(x.dtype()), "reciprocal: the tensor is ", x.dtype(),
                 ", expected a floating dtype; cast it first");
  return div(1, x);
}

namespace {

Tensor chosen(const char* name, Binary op, Binary loses, const Tensor& a, const Tensor& b) {
  return record(name, {a, b}, raw::binary(op, a, b),
                [loses, a = Saved(a), b = Saved(b)](const Tensor& g, Gradients& out) {
                  const Tensor shared = raw::where(a.get() == b.get(), raw::mul(g, 0.5), g);
                  const auto side = [&](const Tensor& mine, const Tensor& other) {
                    const Tensor lost = raw::binary(loses, mine, other);
                    return sum_to(zero_where(lost, shared), mine.shape());
                  };
                  if (out.wants(0)) out.set(0, side(a.get(), b.get()));
                  if (out.wants(1)) out.set(1, side(b.get(), a.get()));
                });
}

}  // namespace

Tensor minimum(const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("minimum", at);
  return chosen("minimum", Binary::min, Binary::gt, a, b);
}
Tensor maximum(const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("maximum", at);
  return chosen("maximum", Binary::max, Binary::lt, a, b);
}
Tensor clamp(const Tensor& x, std::optional<double> low, std::optional<double> high, Caller at) {
  const CallSite site("clamp", at);
  TESSERA_EXPECT(low || high, "clamp: neither a lowest nor a highest value is given; give one");
  Tensor y = x.detach();
  if (low) y = raw::binary(Binary::max, y, *low);
  if (high) y = raw::binary(Binary::min, y, *high);
  return record("clamp", {x}, y, [x = Saved(x), low, high](const Tensor& g, Gradients& out) {
    Tensor dx = g;
    if (low) dx = zero_where(x.get() < *low, dx);
    if (high) dx = zero_where(x.get() > *high, dx);
    out.set(0, std::move(dx));
  });
}

Tensor detail::compare(Binary op, const Operand& a, const Operand& b) {
  const CallSite site(kernels::name(op), a.at);
  return raw::binary(op, a.tensor, b.tensor);
}
Tensor detail::compare(Binary op, const Operand& a, double b) {
  const CallSite site(kernels::name(op), a.at);
  return raw::binary(op, a.tensor, b);
}
Tensor logical_and(const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("logical_and", at);
  return raw::binary(Binary::logical_and, a, b);
}
Tensor logical_or(const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("logical_or", at);
  return raw::binary(Binary::logical_or, a, b);
}
Tensor logical_not(const Tensor& x, Caller at) {
  const CallSite site("logical_not", at);
  return raw::logical_not(x);
}
Tensor isnan(const Tensor& x, Caller at) {
  const CallSite site("isnan", at);
  return x != x;
}
Tensor isinf(const Tensor& x, Caller at) {
  const CallSite site("isinf", at);
  if (!is_floating(x.dtype())) return x != x;
  return raw::abs(x) == std::numeric_limits<double>::infinity();
}
Tensor isfinite(const Tensor& x, Caller at) {
  const CallSite site("isfinite", at);
  return is_floating(x.dtype()) ? raw::isfinite(x) : x == x;
}

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("where", at);
  return record(
      "where", {a, b}, raw::where(condition, a, b),
      [c = Saved(condition), sa = a.shape(), sb = b.shape()](const Tensor& g, Gradients& out) {
        const Tensor zero = scalar_like(g, 0);
        if (out.wants(0)) out.set(0, sum_to(raw::where(c.get(), g, zero), sa));
        if (out.wants(1)) out.set(1, sum_to(raw::where(c.get(), zero, g), sb));
      });
}
Tensor where(const Tensor& condition, const Tensor& a, double b, Caller at) {
  const CallSite site("where", at);
  return where(condition, a, scalar_like(a, b));
}
Tensor where(const Tensor& condition, double a, const Tensor& b, Caller at) {
  const CallSite site("where", at);
  return where(condition, scalar_like(b, a), b);
}
Tensor masked_fill(const Tensor& x, const Tensor& mask, double value, Caller at) {
  const CallSite site("masked_fill", at);
  return where(mask, value, x);
}

// The rows of unary.def that say what their derivative is.
#define TESSERA_UNARY(name, theirs, result, on_floats, on_integers, slope, ...) \
  TESSERA_DEFINES_##slope(name, __VA_ARGS__)
#define TESSERA_DEFINES_fused(name, keeps, ...)                                       \
  Tensor name(const Tensor& x, Caller at) {                                           \
    const CallSite site(#name, at);                                                   \
    return function(Unary::name, x, Keeps::keeps, slope_of<Binary::name##_backward>); \
  }
#define TESSERA_DEFINES_composed(name, keeps, ...)                                                \
  Tensor name(const Tensor& operand, Caller at) {                                                 \
    const CallSite site(#name, at);                                                               \
    return function(Unary::name, operand, Keeps::keeps, [](const Tensor& kept, const Tensor& g) { \
      [[maybe_unused]] const Value x{kept}, y{g};                                                 \
      return (__VA_ARGS__).tensor;                                                                \
    });                                                                                           \
  }
#define TESSERA_DEFINES_steps(name, ...)    \
  Tensor name(const Tensor& x, Caller at) { \
    const CallSite site(#name, at);         \
    return steps(Unary::name, x);           \
  }
#define TESSERA_DEFINES_own(...)
#include "tessera/kernels/unary.def"

Tensor leaky_relu(const Tensor& x, double slope, Caller at) {
  const CallSite site("leaky_relu", at);
  return where(x > 0, x, x * slope);
}
// The power of what is not below 0 would overflow, and 0 times infinity is no gradient.
Tensor elu(const Tensor& x, double alpha, Caller at) {
  const CallSite site("elu", at);
  return where(x > 0, x, expm1(clamp(x, std::nullopt, 0)) * alpha);
}
Tensor log_sigmoid(const Tensor& x, Caller at) {
  const CallSite site("log_sigmoid", at);
  return neg(softplus(neg(x)));
}
Tensor swiglu(const Tensor& gate, const Tensor& up, InputForm form, Caller at) {
  const CallSite site("swiglu", at);
  return record("swiglu", {gate, up}, gated(gate, up, form),
                [gate = Saved(gate), up = Saved(up)](const Tensor& g, Gradients& out) mutable {
                  const bool again = out.graph_is_retained();
                  auto [d_gate, d_up] = again
                                            ? raw::swiglu_backward(gate.get(), up.get(), g)
                                            : raw::swiglu_backward(gate.extract(), up.extract(), g);
                  out.set(0, std::move(d_gate));
                  out.set(1, std::move(d_up));
                });
}
Tensor swiglu(const Tensor& gate_up, InputForm form, Caller at) {
  const CallSite site("swiglu", at);
  const auto [gate, up] = raw::halves(gate_up);
  return record("swiglu", {gate_up}, gated(gate, up, form),
                [gate_up = Saved(gate_up)](const Tensor& g, Gradients& out) mutable {
                  out.set(0, out.graph_is_retained() ? raw::swiglu_backward(gate_up.get(), g)
                                                     : raw::swiglu_backward(gate_up.extract(), g));
                });
}

Tensor cast(const Tensor& x, DType dtype, Caller at) {
  const CallSite site("cast", at);
  if (x.dtype() == dtype) return x;
  if (!is_floating(dtype)) return raw::cast(x, dtype);  // has no derivative, and so no history
  TESSERA_EXPECT(!is_storage_only(dtype) || !x.requires_grad(),
                 "cast: the tensor requires a gradient, which ", dtype,
                 " can't sum; detach the tensor first");
  return record("cast", {x}, raw::cast(x, dtype),
                [from = x.dtype()](const Tensor& g, Gradients& out) {
                  if (is_floating(from)) out.set(0, raw::cast(g, from));
                });
}

}  // namespace tessera
