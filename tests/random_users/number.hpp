// What a value must be and how far the library's may be from it, by the standard model of rounding:
// each operation of a formula is off by one rounding of its result, or by what its function
// documents. A formula over Number derives its own bound.
//
// tests/kernels/bounded.hpp does the same for one kernel, in one type of computing. Here the dtype
// is the value's own, and each operation may be a launch of its own, whose result is stored in it.
#pragma once

#include <cmath>

#include "tests/kernels/bounded.hpp"

namespace tessera::testing {

// Of one rounding, relative. In f64 the reference rounds as well.
constexpr double unit(DType dtype) { return kernel_test::epsilon(dtype) * (dtype == f64 ? 2 : 1); }

struct Number {
  double value = 0, error = 0;
  DType dtype = f64;

  bool is_exact() const { return error == 0; }
  double low() const { return value - error; }
  double high() const { return value + error; }
};

// A result: `carried` comes from its operands, `roundings` are those of the computing type, which
// is f32 for 16 bits; one of its dtype follows there. Integers are exact.
inline Number rounded(double value, double carried, DType dtype, double roundings = 1) {
  if (!is_floating(dtype)) return {value, 0, dtype};
  const DType computing = kernel_test::computed_in(dtype);
  const double relative = roundings * unit(computing) + (computing == dtype ? 0 : unit(dtype));
  const double most = std::abs(value) + carried;
  // Above the largest f16 the library may have infinity, and what comes of it: nothing is known.
  const bool overflows = dtype == f16 && most > 60000;
  return {value, overflows ? INFINITY : carried + relative * most + kernel_test::smallest(dtype),
          dtype};
}
inline Number exact(double value, DType dtype) { return {value, 0, dtype}; }

inline Number operator-(Number a) { return {-a.value, a.error, a.dtype}; }
inline Number operator+(Number a, Number b) {
  return rounded(a.value + b.value, a.error + b.error, a.dtype);
}
inline Number operator-(Number a, Number b) { return a + -b; }
inline Number operator*(Number a, Number b) {
  return rounded(a.value * b.value,
                 std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error,
                 a.dtype);
}
inline Number operator/(Number a, Number b) {
  if (!is_floating(a.dtype))
    return exact(b.value == 0 ? 0 : std::trunc(a.value / b.value), a.dtype);
  const double least = std::abs(b.value) - b.error, quotient = a.value / b.value;
  return rounded(quotient, least > 0 ? (a.error + std::abs(quotient) * b.error) / least : INFINITY,
                 a.dtype);
}
// A constant may have been rounded to the computing type.
inline Number like(Number a, double constant) {
  const bool is_whole = std::floor(constant) == constant || !is_floating(a.dtype);
  return {constant, is_whole ? 0 : unit(kernel_test::computed_in(a.dtype)) * std::abs(constant),
          a.dtype};
}
inline Number operator+(Number a, double b) { return a + like(a, b); }
inline Number operator-(Number a, double b) { return a - like(a, b); }
inline Number operator*(Number a, double b) { return a * like(a, b); }
inline Number operator/(Number a, double b) { return a / like(a, b); }
inline Number operator-(double a, Number b) { return like(b, a) - b; }
inline Number operator/(double a, Number b) { return like(b, a) / b; }

// f rises or falls: at the ends of x's interval it is farthest from its value.
template <class F>
Number monotone(F f, Number x, double roundings) {
  const double y = f(x.value);
  const double carried = std::max(std::abs(f(x.low()) - y), std::abs(f(x.high()) - y));
  return rounded(y, x.is_exact() ? 0 : carried, x.dtype, roundings);
}
// The roundings are those that tests/kernels/bounded.hpp has of each function.
inline Number exp(Number x) {
  return monotone([](double v) { return std::exp(v); }, x, 4);
}
inline Number expm1(Number x) {
  return monotone([](double v) { return std::expm1(v); }, x, 4);
}
inline Number log(Number x) {
  return monotone([](double v) { return std::log(v); }, x, 4);
}
inline Number log1p(Number x) {
  return monotone([](double v) { return std::log1p(v); }, x, 4);
}
inline Number sqrt(Number x) {
  return monotone([](double v) { return std::sqrt(v); }, x, 1);
}
inline Number tanh(Number x) {
  return monotone([](double v) { return std::tanh(v); }, x, 8);
}
inline Number erf(Number x) {
  return monotone([](double v) { return std::erf(v); }, x, 4);
}
inline Number sigmoid(Number x) {
  return monotone([](double v) { return 1 / (1 + std::exp(-v)); }, x, 9);
}
inline Number sin(Number x) { return rounded(std::sin(x.value), x.error, x.dtype, 8); }
inline Number cos(Number x) { return rounded(std::cos(x.value), x.error, x.dtype, 8); }
// Of x > 0 it is monotone in both.
inline Number pow(Number x, Number y) {
  const double power = std::pow(x.value, y.value);
  double carried = 0;
  for (const double a : {x.low(), x.high()})
    for (const double b : {y.low(), y.high()})
      carried = std::max(carried, std::abs(std::pow(a, b) - power));
  return rounded(power, x.low() > 0 ? carried : INFINITY, x.dtype, 8);
}
inline Number abs(Number x) { return {std::abs(x.value), x.error, x.dtype}; }
inline Number max(Number a, Number b) {
  return {std::max(a.value, b.value), std::max(a.error, b.error), a.dtype};
}
inline Number min(Number a, Number b) { return -max(-a, -b); }

// Which side of 0 x is on: one of the three, or anything between the outer two if that is open.
inline Number side(Number x, double below, double at, double above) {
  if (x.low() > 0) return exact(above, x.dtype);
  if (x.high() < 0) return exact(below, x.dtype);
  if (x.is_exact()) return exact(at, x.dtype);
  return {(below + above) / 2, std::abs(above - below) / 2, x.dtype};
}

// A sum in any order, in the computing type, rounded once. One term alone is only moved.
class Sum {
 public:
  void add(Number term) {
    last_ = term;
    value_ += term.value;
    carried_ += term.error;
    magnitude_ += std::abs(term.value) + term.error;
    ++count_;
  }
  bool is_empty() const { return count_ == 0; }
  // `rounded_parts`: whether sums of some terms may have been rounded to the dtype before.
  Number get(DType dtype, bool rounded_parts = false) const {
    if (count_ == 0) return exact(0, dtype);
    if (count_ == 1) return last_;
    if (!is_floating(dtype)) return exact(value_, dtype);
    const double each = kernel_test::sum_roundings(count_) * unit(kernel_test::computed_in(dtype)) +
                        (rounded_parts ? static_cast<double>(count_ - 1) * unit(dtype) : 0);
    return rounded(value_, carried_ + each * magnitude_, dtype);
  }

 private:
  Number last_;
  double value_ = 0, carried_ = 0, magnitude_ = 0;
  std::int64_t count_ = 0;
};

}  // namespace tessera::testing
