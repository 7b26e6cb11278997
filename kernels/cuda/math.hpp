// What kernels/formulas.hpp is written over, for one value of a thread: f32 or f64.
#pragma once

#include <cmath>
#include <numbers>

#include "kernels/cuda/gpu.hpp"
#include "kernels/formulas.hpp"

namespace tessera::kernels::cuda {

// Within 5 roundings: one of 1 + exp(-x), two each of exp and the quotient. Below 2^-126 it is 0.
template <class C>
TESSERA_DEVICE C sigmoid(C x) {
  return fast_quotient(C(1), C(1) + std::exp(-x));
}

// sin(x - half pi) of half 0 or 1/2, up to the sign: x less the nearest such multiple of pi, taken
// away in three parts, then the sine of half turns. The library's sine would need an array in local
// memory for angles beyond 2^31; this one is accurate up to there, and within [-1, 1] beyond.
TESSERA_DEVICE double sine_from(double half, double x) {
  constexpr double kParts[] = {3.141592653589793116, 1.2246467991473532e-16,
                               -2.9947698097183397e-33};
  const double turns = std::rint(std::fma(x, std::numbers::inv_pi, -half)), q = turns + half;
  const double r = std::fma(-q, kParts[2], std::fma(-q, kParts[1], std::fma(-q, kParts[0], x)));
  const double s = sinpi(r * std::numbers::inv_pi);
  return turns != 2 * std::floor(turns / 2) ? -s : s;
}

template <class C>
struct Value {
  C v;

  Value() = default;
  TESSERA_DEVICE explicit Value(C x) : v(x) {}

  friend TESSERA_DEVICE Value operator+(Value a, Value b) { return Value(a.v + b.v); }
  friend TESSERA_DEVICE Value operator-(Value a, Value b) { return Value(a.v - b.v); }
  friend TESSERA_DEVICE Value operator*(Value a, Value b) { return Value(a.v * b.v); }
  friend TESSERA_DEVICE Value operator/(Value a, Value b) { return Value(a.v / b.v); }
  friend TESSERA_DEVICE Value operator-(Value a) { return Value(-a.v); }

  friend TESSERA_DEVICE Value fma(Value a, Value b, Value c) {
    return Value(std::fma(a.v, b.v, c.v));
  }
  friend TESSERA_DEVICE Value rounded_product(Value a, Value b) {
    return Value(cuda::rounded_product(a.v, b.v));
  }
  friend TESSERA_DEVICE bool less(Value a, Value b) { return a.v < b.v; }
  friend TESSERA_DEVICE Value select(bool mask, Value a, Value b) { return mask ? a : b; }
  // NaN if either is NaN.
  friend TESSERA_DEVICE Value min(Value a, Value b) { return a.v < b.v || a.v != a.v ? a : b; }
  friend TESSERA_DEVICE Value max(Value a, Value b) { return a.v > b.v || a.v != a.v ? a : b; }
  friend TESSERA_DEVICE Value abs(Value x) { return Value(std::abs(x.v)); }
  friend TESSERA_DEVICE Value sqrt(Value x) { return Value(std::sqrt(x.v)); }
  friend TESSERA_DEVICE Value exp(Value x) { return Value(std::exp(x.v)); }
  friend TESSERA_DEVICE Value log(Value x) { return Value(std::log(x.v)); }
  friend TESSERA_DEVICE Value tanh(Value x) { return Value(std::tanh(x.v)); }
  friend TESSERA_DEVICE Value sin(Value x) { return Value(static_cast<C>(sine_from(0, x.v))); }
  friend TESSERA_DEVICE Value cos(Value x) { return Value(static_cast<C>(-sine_from(0.5, x.v))); }
  friend TESSERA_DEVICE Value erf(Value x) { return Value(std::erf(x.v)); }
  friend TESSERA_DEVICE Value log1p(Value x) { return Value(std::log1p(x.v)); }
  friend TESSERA_DEVICE Value expm1(Value x) { return Value(std::expm1(x.v)); }
  friend TESSERA_DEVICE Value floor(Value x) { return Value(std::floor(x.v)); }
  friend TESSERA_DEVICE Value round(Value x) { return Value(std::nearbyint(x.v)); }
  friend TESSERA_DEVICE Value pow(Value a, Value b) { return Value(std::pow(a.v, b.v)); }
  friend TESSERA_DEVICE Value sigmoid(Value x) { return Value(cuda::sigmoid(x.v)); }
};

}  // namespace tessera::kernels::cuda
