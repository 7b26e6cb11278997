// Arithmetic, comparisons and functions of single elements. A number may stand on either side of an
// operator. There is no `a += b`, since values never change: write a = a + b.
#pragma once

#include <optional>

#include "tessera/autograd/input_form.hpp"
#include "tessera/autograd/node.hpp"
#include "tessera/autograd/operand.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

// --- arithmetic ---
Tensor add(const Tensor& a, const Tensor& b, Caller at = Caller::current());
Tensor sub(const Tensor& a, const Tensor& b, Caller at = Caller::current());
Tensor mul(const Tensor& a, const Tensor& b, Caller at = Caller::current());
Tensor div(const Tensor& a, const Tensor& b, Caller at = Caller::current());
Tensor add(const Tensor& a, double b, Caller at = Caller::current());
Tensor mul(const Tensor& a, double b, Caller at = Caller::current());
Tensor sub(double a, const Tensor& b, Caller at = Caller::current());
Tensor div(double a, const Tensor& b, Caller at = Caller::current());
Tensor div(const Tensor& a, double b, Caller at = Caller::current());
Tensor neg(const Tensor& x, Caller at = Caller::current());
inline Tensor operator+(const Operand& a, const Tensor& b) { return add(a.tensor, b, a.at); }
inline Tensor operator-(const Operand& a, const Tensor& b) { return sub(a.tensor, b, a.at); }
inline Tensor operator*(const Operand& a, const Tensor& b) { return mul(a.tensor, b, a.at); }
inline Tensor operator/(const Operand& a, const Tensor& b) { return div(a.tensor, b, a.at); }
inline Tensor operator+(const Operand& a, double b) { return add(a.tensor, b, a.at); }
inline Tensor operator-(const Operand& a, double b) { return add(a.tensor, -b, a.at); }
inline Tensor operator*(const Operand& a, double b) { return mul(a.tensor, b, a.at); }
inline Tensor operator/(const Operand& a, double b) { return div(a.tensor, b, a.at); }
inline Tensor operator+(double a, const Operand& b) { return add(b.tensor, a, b.at); }
inline Tensor operator-(double a, const Operand& b) { return sub(a, b.tensor, b.at); }
inline Tensor operator*(double a, const Operand& b) { return mul(b.tensor, a, b.at); }
inline Tensor operator/(double a, const Operand& b) { return div(a, b.tensor, b.at); }
inline Tensor operator-(const Operand& x) { return neg(x.tensor, x.at); }

// x to the power of y, floating. The gradient of x is 0 where y is 0. The gradient of y is 0 where
// x is 0 and y >= 0.
Tensor pow(const Tensor& x, const Tensor& y, Caller at = Caller::current());
Tensor pow(const Tensor& x, double y, Caller at = Caller::current());
Tensor pow(double x, const Tensor& y, Caller at = Caller::current());
Tensor square(const Tensor& x, Caller at = Caller::current());
Tensor reciprocal(const Tensor& x, Caller at = Caller::current());
// The smaller, and the larger, of each two elements; NaN if either is. Equal ones share the
// gradient.
Tensor minimum(const Tensor& a, const Tensor& b, Caller at = Caller::current());
Tensor maximum(const Tensor& a, const Tensor& b, Caller at = Caller::current());
// min(max(x, low), high); either bound may be left out. The gradient is 0 where x is outside.
Tensor clamp(const Tensor& x, std::optional<double> low, std::optional<double> high = {},
             Caller at = Caller::current());

// --- comparisons and logic: boolean tensors without history ---
namespace detail {
Tensor compare(raw::Binary op, const Operand& a, const Operand& b);
Tensor compare(raw::Binary op, const Operand& a, double b);
}  // namespace detail
inline Tensor operator==(const Operand& a, const Operand& b) {
  return detail::compare(raw::Binary::eq, a, b);
}
inline Tensor operator!=(const Operand& a, const Operand& b) {
  return detail::compare(raw::Binary::ne, a, b);
}
inline Tensor operator<(const Operand& a, const Operand& b) {
  return detail::compare(raw::Binary::lt, a, b);
}
inline Tensor operator<=(const Operand& a, const Operand& b) {
  return detail::compare(raw::Binary::le, a, b);
}
inline Tensor operator>(const Operand& a, const Operand& b) {
  return detail::compare(raw::Binary::gt, a, b);
}
inline Tensor operator>=(const Operand& a, const Operand& b) {
  return detail::compare(raw::Binary::ge, a, b);
}
inline Tensor operator==(const Operand& a, double b) {
  return detail::compare(raw::Binary::eq, a, b);
}
inline Tensor operator!=(const Operand& a, double b) {
  return detail::compare(raw::Binary::ne, a, b);
}
inline Tensor operator<(const Operand& a, double b) {
  return detail::compare(raw::Binary::lt, a, b);
}
inline Tensor operator<=(const Operand& a, double b) {
  return detail::compare(raw::Binary::le, a, b);
}
inline Tensor operator>(const Operand& a, double b) {
  return detail::compare(raw::Binary::gt, a, b);
}
inline Tensor operator>=(const Operand& a, double b) {
  return detail::compare(raw::Binary::ge, a, b);
}
inline Tensor operator<(double a, const Operand& b) { return b > a; }
inline Tensor operator<=(double a, const Operand& b) { return b >= a; }
inline Tensor operator>(double a, const Operand& b) { return b < a; }
inline Tensor operator>=(double a, const Operand& b) { return b <= a; }
// For any dtype; an element that is not 0 is true.
Tensor logical_and(const Tensor& a, const Tensor& b, Caller at = Caller::current());
Tensor logical_or(const Tensor& a, const Tensor& b, Caller at = Caller::current());
Tensor logical_not(const Tensor& x, Caller at = Caller::current());
Tensor isnan(const Tensor& x, Caller at = Caller::current());
Tensor isinf(const Tensor& x, Caller at = Caller::current());
Tensor isfinite(const Tensor& x, Caller at = Caller::current());

// condition ? a : b.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b,
             Caller at = Caller::current());
Tensor where(const Tensor& condition, const Tensor& a, double b, Caller at = Caller::current());
Tensor where(const Tensor& condition, double a, const Tensor& b, Caller at = Caller::current());
// x, with `value` where `mask` is true.
Tensor masked_fill(const Tensor& x, const Tensor& mask, double value,
                   Caller at = Caller::current());

// --- functions, floating but abs, sign, floor and round ---
// Tensor exp(const Tensor& x, Caller at), and each other row of kernels/unary.def.
#define TESSERA_UNARY(name, theirs, result, on_floats, on_integers, slope, ...) \
  TESSERA_DECLARES_##slope(name)
#define TESSERA_DECLARES_fused(name) Tensor name(const Tensor& x, Caller at = Caller::current());
#define TESSERA_DECLARES_composed(name) TESSERA_DECLARES_fused(name)
#define TESSERA_DECLARES_steps(name) TESSERA_DECLARES_fused(name)
#define TESSERA_DECLARES_own(name)
#include "tessera/kernels/unary.def"
#undef TESSERA_DECLARES_fused
#undef TESSERA_DECLARES_composed
#undef TESSERA_DECLARES_steps
#undef TESSERA_DECLARES_own

// slope x below 0, x above; the derivative at 0 is slope.
Tensor leaky_relu(const Tensor& x, double slope = 0.01, Caller at = Caller::current());
// alpha (exp(x) - 1) below 0, x above.
Tensor elu(const Tensor& x, double alpha = 1, Caller at = Caller::current());
Tensor log_sigmoid(const Tensor& x, Caller at = Caller::current());
// silu(gate) * up. `form`: how the result is written for its readers; see autograd/input_form.hpp.
Tensor swiglu(const Tensor& gate, const Tensor& up, InputForm form = {},
              Caller at = Caller::current());
// The same, of gate and up side by side: [..., 2 h] -> [..., h]. They are read, and differentiated,
// where they lie.
Tensor swiglu(const Tensor& gate_up, InputForm form = {}, Caller at = Caller::current());

// Between floating dtypes the gradient is cast back. A result of integers or booleans has no
// gradient.
Tensor cast(const Tensor& x, DType dtype, Caller at = Caller::current());

}  // namespace tessera
