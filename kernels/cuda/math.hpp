// The activation functions and their derivatives, for f32 and f64; the formulas of
// kernels/host/math.hpp.
#pragma once

#include <cmath>

#include "kernels/cuda/gpu.hpp"

namespace tessera::kernels::cuda {

// Within 5 roundings: one of 1 + exp(-x), two each of exp and the quotient. Below 2^-126 it is 0.
template <class C>
TESSERA_DEVICE C sigmoid(C x) {
  return fast_quotient(C(1), C(1) + std::exp(-x));
}

template <class C>
TESSERA_DEVICE C silu(C x) {
  return x * sigmoid(x);
}

// silu'(x) = s (1 + x (1 - s)) with s = sigmoid(x).
template <class C>
TESSERA_DEVICE C silu_slope(C x) {
  const C s = sigmoid(x);
  return s * std::fma(x, 1 - s, C(1));
}

inline constexpr double kGeluScale = 0.7978845608028654;  // sqrt(2 / pi)
inline constexpr double kGeluCubic = 0.044715;

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), which keeps its relative accuracy for negative x.
template <class C>
TESSERA_DEVICE C gelu(C x) {
  constexpr C cubic = C(2 * kGeluScale * kGeluCubic), linear = C(2 * kGeluScale);
  return x * sigmoid(x * std::fma(cubic, x * x, linear));
}

// d/dx x sigmoid(w(x)) = s (1 + x (1 - s) w'(x)).
template <class C>
TESSERA_DEVICE C gelu_slope(C x) {
  constexpr C cubic = C(2 * kGeluScale * kGeluCubic), linear = C(2 * kGeluScale);
  const C square = x * x, s = sigmoid(x * std::fma(cubic, square, linear));
  return s * std::fma(x * (1 - s), std::fma(3 * cubic, square, linear), C(1));
}

}  // namespace tessera::kernels::cuda
