// Functions of vectors, lane by lane: what kernels/formulas.hpp is written over on the host.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/host/simd.hpp"

// As in simd.hpp.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"

namespace tessera::kernels::host {

// Calls f(lane value) on each lane: for functions that have no vector form.
template <class C, class F>
inline Vec<C> lanewise(Vec<C> a, F f) {
  alignas(64) C lanes[kLanes<C>];
  store(lanes, a);
  for (C& x : lanes) x = f(x);
  return load(lanes);
}

// Eigen's exp clamps its argument; this one overflows to infinity and underflows to 0.
template <class C>
inline Vec<C> exp(Vec<C> x) {
  constexpr C high = std::is_same_v<C, float> ? C(88.72283) : C(709.782712893384);
  constexpr C low = std::is_same_v<C, float> ? C(-87.33654) : C(-708.39641853226408);
  const Vec<C> y(Eigen::internal::pexp(x.v), 0);
  const Vec<C> above = select(less(Vec<C>(high), x), Vec<C>(std::numeric_limits<C>::infinity()), y);
  return select(less(x, Vec<C>(low)), Vec<C>(C(0)), above);
}
template <class C>
inline Vec<C> log(Vec<C> x) {
  return Vec<C>(Eigen::internal::plog(x.v), 0);
}
template <class C>
inline Vec<C> tanh(Vec<C> x) {
  if constexpr (std::is_same_v<C, float> && kLanes<C> > 1) {
    return Vec<C>(Eigen::internal::ptanh(x.v), 0);
  } else {
    return lanewise(x, [](C lane) { return std::tanh(lane); });
  }
}
template <class C>
inline Vec<C> sin(Vec<C> x) {
  return lanewise(x, [](C lane) { return std::sin(lane); });
}
template <class C>
inline Vec<C> cos(Vec<C> x) {
  return lanewise(x, [](C lane) { return std::cos(lane); });
}
template <class C>
inline Vec<C> erf(Vec<C> x) {
  return lanewise(x, [](C lane) { return std::erf(lane); });
}
template <class C>
inline Vec<C> log1p(Vec<C> x) {
  return lanewise(x, [](C lane) { return std::log1p(lane); });
}
template <class C>
inline Vec<C> expm1(Vec<C> x) {
  return lanewise(x, [](C lane) { return std::expm1(lane); });
}
template <class C>
inline Vec<C> floor(Vec<C> x) {
  return lanewise(x, [](C lane) { return std::floor(lane); });
}
// Halves to even.
template <class C>
inline Vec<C> round(Vec<C> x) {
  return lanewise(x, [](C lane) { return std::nearbyint(lane); });
}
// Of each lane alone.
template <class C>
inline Vec<C> pow(Vec<C> a, Vec<C> b) {
  alignas(64) C lanes[kLanes<C>], powers[kLanes<C>];
  store(lanes, a);
  store(powers, b);
  for (int lane = 0; lane < kLanes<C>; ++lane) lanes[lane] = std::pow(lanes[lane], powers[lane]);
  return load(lanes);
}
// Kernels are compiled without the contraction of a b + c; a GPU's compiler has it.
template <class C>
inline Vec<C> rounded_product(Vec<C> a, Vec<C> b) {
  return a * b;
}
template <class C>
inline Vec<C> sigmoid(Vec<C> x) {
  return Vec<C>(C(1)) / (Vec<C>(C(1)) + exp(-x));
}

}  // namespace tessera::kernels::host

#pragma GCC diagnostic pop
