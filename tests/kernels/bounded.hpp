// How far a kernel may be from double precision, by the standard model of rounding: each result is
// off by at most one rounding of itself. A formula over Bounded is its own derivation of its bound.
//
//   const Bounded<C> x(in.get(i)), s = sigmoid(x);
//   near(c, out, i, x * s);     // five roundings of the sigmoid, one of the product, the dtype's
//
// An fma counts as a product and a sum, since either may be what a device makes of a b + c.
// The functions' errors are the largest that CUDA documents (C++ Programming Guide, mathematical
// functions; a unit in the last place is two roundings) and that the host's vectors have.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "tests/kernels/case.hpp"

namespace kernel_test {

inline constexpr DType kFloats[] = {f32, bf16, f16, f64};
inline constexpr DType kAll[] = {f32, bf16, f16, f64, i32, i64, boolean};

// Half the distance between the smallest numbers; f32 below 2^-126 may become 0.
constexpr double smallest(DType dtype) {
  return dtype == f16 ? 0x1p-25 : dtype == f64 ? 0x1p-1022 : 0x1p-126;
}

// The type of results that are computed in f32, or in f64 when `dtype` is that.
constexpr DType computed_in(DType dtype) { return dtype == f64 ? f64 : f32; }

// a + b in the computing type, rounded to `dtype`.
inline double rounded_sum(DType dtype, double a, double b) {
  if (dtype == f64 || !is_floating(dtype)) return a + b;
  return rounded_to(dtype, rounded_to(f32, a + b));
}

// Of an operand, before a run.
inline std::vector<double> contents(const Operand& x) {
  std::vector<double> out;
  for (std::int64_t i = 0; i < x.size(); ++i) out.push_back(x.get(i));
  return out;
}

// What moves an array off 16-byte boundaries.
constexpr std::int64_t shift_of(DType dtype, bool shifted) {
  return shifted ? static_cast<std::int64_t>(size_bytes(dtype)) : 0;
}

// A number in double precision, and how far the same number computed in C may be from it.
template <class C>
struct Bounded {
  // Where the reference is no wider than the kernel, it rounds as often.
  static constexpr bool kWide = std::is_same_v<C, double>;
  static constexpr double kUnit = kWide ? 2 * 0x1p-53 : 0x1p-24;
  static constexpr double kTiny = smallest(kWide ? f64 : f32);
  double v = 0, error = 0;

  Bounded() = default;
  // A constant. Whole ones are exact; what makes the others may be contracted.
  explicit Bounded(double x) : v(x), error(std::floor(x) == x ? 0 : 2 * kUnit * std::abs(x)) {}
  // A result: `carried` comes from its operands, `roundings` are its own.
  Bounded(double exact, double carried, double roundings = 1)
      : v(exact), error(carried + roundings * kUnit * (std::abs(exact) + carried) + kTiny) {}
  // What the kernel reads.
  static Bounded given(double x) {
    Bounded b;
    b.v = x;
    return b;
  }

  friend Bounded operator+(Bounded a, Bounded b) { return {a.v + b.v, a.error + b.error}; }
  friend Bounded operator-(Bounded a, Bounded b) { return {a.v - b.v, a.error + b.error}; }
  friend Bounded operator*(Bounded a, Bounded b) {
    return {a.v * b.v, std::abs(a.v) * b.error + std::abs(b.v) * a.error + a.error * b.error};
  }
  friend Bounded operator/(Bounded a, Bounded b) {
    const double least = std::abs(b.v) - b.error, q = a.v / b.v;
    return {q, least > 0 ? (a.error + std::abs(q) * b.error) / least
                         : std::numeric_limits<double>::infinity()};
  }
  friend Bounded operator-(Bounded a) {
    a.v = -a.v;
    return a;
  }
  friend Bounded fma(Bounded a, Bounded b, Bounded c) { return a * b + c; }
  friend Bounded rounded_product(Bounded a, Bounded b) { return a * b; }
  friend Bounded abs(Bounded a) {
    a.v = std::abs(a.v);
    return a;
  }
  friend Bounded sqrt(Bounded a) {
    const double least = std::sqrt(std::max(a.v - a.error, 0.0)), root = std::sqrt(a.v);
    return {root, least + root > 0 ? a.error / (least + root) : std::sqrt(a.error)};
  }
  friend Bounded exp(Bounded a) {  // 2 units
    const double power = std::exp(a.v);
    return {power, power * std::expm1(a.error), 4};
  }
  friend Bounded log(Bounded a) {  // 1 unit on a GPU, 2 on the host
    return {std::log(a.v), -std::log1p(-a.error / a.v), 4};
  }
  friend Bounded tanh(Bounded a) {  // 2 units on a GPU, 4 on the host
    return {std::tanh(a.v), a.error, 8};
  }
  friend Bounded pow(Bounded a, Bounded b) {  // 4 units, of what is given
    return {std::pow(a.v, b.v), 0, 8};
  }
  friend Bounded sigmoid(Bounded a) {  // 2 units each of exp and the quotient, and a sum
    const double s = 1 / (1 + std::exp(-a.v));
    return {s, s * std::expm1(a.error), 9};
  }
  friend bool less(Bounded a, Bounded b) { return a.v < b.v; }
  friend Bounded select(bool first, Bounded a, Bounded b) { return first ? a : b; }
};

// The most roundings that one term sees in any kernel's sum of n: those of a chain of 64 terms, or
// of a 256th of all, of two trees and of the host's blocks; no more than a chain of all.
constexpr double sum_roundings(std::int64_t n) {
  const double terms = static_cast<double>(n);
  return std::min(terms, 64 + terms / 256 + 13 + 60);
}

// A sum in any order that a kernel may choose.
template <class C>
class BoundedSum {
 public:
  void add(Bounded<C> term) {
    value_ += term.v;
    carried_ += term.error;
    magnitude_ += std::abs(term.v) + term.error;
    ++count_;
  }
  Bounded<C> get() const {
    // The reference adds one after the other, in f64.
    const double reference = static_cast<double>(count_) * 0x1p-53;
    return {value_,
            carried_ + (sum_roundings(count_) * (std::is_same_v<C, double> ? 0x1p-53 : 0x1p-24) +
                        reference) *
                           magnitude_};
  }

 private:
  double value_ = 0, carried_ = 0, magnitude_ = 0;
  std::int64_t count_ = 0;
};

// f(C{}), where C is the type that `dtype` is computed in.
template <class F>
void in_compute_type(DType dtype, F f) {
  if (dtype == f64)
    f(double{});
  else
    f(float{});
}

// What rounding a value near `exact` to `dtype` once more adds to its error.
template <class C>
double stored_error(DType dtype, Bounded<C> exact) {
  // A formula that passes through an infinity has come to a limit.
  const double error = std::isfinite(exact.error) ? exact.error : exact.kTiny;
  return error + (size_bytes(dtype) < sizeof(C)
                      ? epsilon(dtype) * (std::abs(exact.v) + error) + smallest(dtype)
                      : 0);
}

// Element i, computed in C, has been rounded to its dtype once.
template <class C>
void near(Case& c, const Operand& operand, std::int64_t i, Bounded<C> exact) {
  c.near(operand, i, exact.v, stored_error(operand.dtype(), exact));
}

}  // namespace kernel_test
