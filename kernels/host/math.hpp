// The activation functions and their derivatives on vectors, in one place for elementwise and fused
// kernels.
#pragma once

#include "kernels/host/simd.hpp"

namespace tessera::kernels::host {

template <class C>
inline Vec<C> silu(Vec<C> x) {
  return x * sigmoid(x);
}

// silu'(x) = s (1 + x (1 - s)) with s = sigmoid(x).
template <class C>
inline Vec<C> silu_slope(Vec<C> x) {
  const Vec<C> s = sigmoid(x), one(C(1));
  return s * fma(x, one - s, one);
}

inline constexpr double kGeluScale = 0.7978845608028654;  // sqrt(2 / pi)
inline constexpr double kGeluCubic = 0.044715;

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), which keeps its relative accuracy for negative x.
template <class C>
inline Vec<C> gelu(Vec<C> x) {
  const Vec<C> cubic(C(2 * kGeluScale * kGeluCubic)), linear(C(2 * kGeluScale));
  return x * sigmoid(x * fma(cubic, x * x, linear));
}

// d/dx x sigmoid(w(x)) = s (1 + x (1 - s) w'(x)).
template <class C>
inline Vec<C> gelu_slope(Vec<C> x) {
  const Vec<C> cubic(C(2 * kGeluScale * kGeluCubic)), linear(C(2 * kGeluScale)), one(C(1));
  const Vec<C> square = x * x;
  const Vec<C> s = sigmoid(x * fma(cubic, square, linear));
  const Vec<C> slope = fma(Vec<C>(C(3)) * cubic, square, linear);
  return s * fma(x * (one - s), slope, one);
}

}  // namespace tessera::kernels::host
