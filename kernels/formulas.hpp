// The formulas of unary.def and binary.def as code, once for the host's vectors and for a GPU.
//
// On floats a formula is written over V: host::Vec<C>, several elements, or cuda::Value<C>, the one
// of a GPU's thread. Either has V(number), + - * /, fma, exp, log, sqrt, tanh, sin, cos, erf,
// log1p, expm1, floor, round, pow, abs, min, max, sigmoid, less, select, and rounded_product, which
// is never part of an fma. Comparisons and integers see single elements. To be included behind
// host/math.hpp or cuda/gpu.hpp.
#pragma once

#include <limits>
#include <type_traits>

#include "tessera/kernels/ops.hpp"

#ifndef TESSERA_DEVICE  // what gpu.hpp puts before a function of a kernel
#define TESSERA_DEVICE inline
#endif

namespace tessera::kernels {

template <class V>
TESSERA_DEVICE V silu(V x) {
  return x * sigmoid(x);
}

template <class V>
TESSERA_DEVICE V sign(V x) {
  const V zero(0);
  return select(less(zero, x), V(1), select(less(x, zero), V(-1), zero));
}

// log(1 + exp(x)), of a power that does not overflow.
template <class V>
TESSERA_DEVICE V softplus(V x) {
  const V zero(0);
  return select(less(x, zero), zero, x) + log1p(exp(-abs(x)));
}

// x tanh(softplus(x)), and its derivative.
template <class V>
TESSERA_DEVICE V mish(V x) {
  return x * tanh(softplus(x));
}
template <class V>
TESSERA_DEVICE V mish_slope(V x) {
  const V t = tanh(softplus(x));
  return fma(x * sigmoid(x), fma(-t, t, V(1)), t);
}

// Writes where the parts of slices have row `id` of the table that they are cut from: id i of
// LocateArgs, which Args is.
template <class Args>
TESSERA_DEVICE void locate_one(const Args& a, std::int64_t i, std::int64_t id) {
  const bool exists = id >= 0 && id < a.vocab;
  std::int64_t part = -1, row = 0;  // the part of all, and the row there
  if (const std::int64_t at = exists ? id % a.chunk - a.begin : -1; at >= 0) {
    const std::int64_t slice = at / a.rows, left = a.chunk - a.begin - slice * a.rows;
    row = id / a.chunk * (left < a.rows ? left : a.rows) + at % a.rows;
    part = slice * a.parts + row / a.part_rows;
    row %= a.part_rows;
  }
  for (std::int64_t p = 0; p < std::int64_t{a.slices} * a.parts; ++p)
    static_cast<std::int32_t*>(a.out)[p * a.count + i] = p == part ? static_cast<std::int32_t>(row)
                                                         : exists  ? -1
                                                         : id == a.ignored ? a.ignored
                                                                           : -2;
}

// silu'(x) = s (1 + x (1 - s)) with s = sigmoid(x).
template <class V>
TESSERA_DEVICE V silu_slope(V x) {
  const V s = sigmoid(x), one(1);
  return s * fma(x, one - s, one);
}

inline constexpr double kGeluScale = 0.7978845608028654;  // sqrt(2 / pi)
inline constexpr double kGeluCubic = 0.044715;

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), which keeps its relative accuracy for negative x.
template <class V>
TESSERA_DEVICE V gelu(V x) {
  const V cubic(2 * kGeluScale * kGeluCubic), linear(2 * kGeluScale);
  return x * sigmoid(x * fma(cubic, x * x, linear));
}

// d/dx x sigmoid(w(x)) = s (1 + x (1 - s) w'(x)).
template <class V>
TESSERA_DEVICE V gelu_slope(V x) {
  const V cubic(2 * kGeluScale * kGeluCubic), linear(2 * kGeluScale), one(1);
  const V square = x * x;
  const V s = sigmoid(x * fma(cubic, square, linear));
  const V slope = fma(V(3) * cubic, square, linear);
  return s * fma(x * (one - s), slope, one);
}

inline constexpr double kInverseRoot2 = 0.7071067811865476;    // 1 / sqrt(2)
inline constexpr double kInverseRoot2Pi = 0.3989422804014327;  // 1 / sqrt(2 pi)

// The normal distribution's share below x.
template <class V>
TESSERA_DEVICE V normal_share(V x) {
  const V half(0.5);
  return fma(half, erf(x * V(kInverseRoot2)), half);
}
template <class V>
TESSERA_DEVICE V gelu_exact(V x) {
  return x * normal_share(x);
}
template <class V>
TESSERA_DEVICE V gelu_exact_slope(V x) {
  return fma(x * V(kInverseRoot2Pi), exp(V(-0.5) * (x * x)), normal_share(x));
}

// The bits of an integer: sums and products of them wrap.
template <class I>
TESSERA_DEVICE std::make_unsigned_t<I> wrap(I x) {
  return static_cast<std::make_unsigned_t<I>>(x);
}
// Truncated; 0 where there is none.
template <class I>
TESSERA_DEVICE I quotient(I x, I y) {
  const bool undefined = y == 0 || (y == -1 && x == std::numeric_limits<I>::min());
  return undefined ? I{0} : static_cast<I>(x / y);
}

// What an operation gives that does not exist.
struct None {};

// `floats` and `integers` of an operation, as its line in the list has them.
template <auto op>
struct Formula;

#define TESSERA_UNARY(name, theirs, result, on_floats, on_integers, ...) \
  template <>                                                            \
  struct Formula<UnaryOp::name> {                                        \
    static constexpr UnaryOp op = UnaryOp::name;                         \
    template <class V>                                                   \
    static TESSERA_DEVICE auto floats([[maybe_unused]] V x) {            \
      return on_floats;                                                  \
    }                                                                    \
    template <class I>                                                   \
    static TESSERA_DEVICE auto integers([[maybe_unused]] I x) {          \
      return on_integers;                                                \
    }                                                                    \
  };
#include "tessera/kernels/unary.def"

#define TESSERA_BINARY(name, result, on_floats, on_integers)                          \
  template <>                                                                         \
  struct Formula<BinaryOp::name> {                                                    \
    static constexpr BinaryOp op = BinaryOp::name;                                    \
    template <class V>                                                                \
    static TESSERA_DEVICE auto floats([[maybe_unused]] V x, [[maybe_unused]] V y) {   \
      return on_floats;                                                               \
    }                                                                                 \
    template <class I>                                                                \
    static TESSERA_DEVICE auto integers([[maybe_unused]] I x, [[maybe_unused]] I y) { \
      return on_integers;                                                             \
    }                                                                                 \
  };
#include "tessera/kernels/binary.def"

// Whether formula F exists on floats of type V, or integers of type I.
template <class F, class V>
constexpr bool has_floats() {
  if constexpr (std::is_same_v<decltype(F::op), const UnaryOp>)
    return !std::is_same_v<decltype(F::floats(V{})), None>;
  else
    return !std::is_same_v<decltype(F::floats(V{}, V{})), None>;
}
template <class F, class I>
constexpr bool has_integers() {
  if constexpr (std::is_same_v<decltype(F::op), const UnaryOp>)
    return !std::is_same_v<decltype(F::integers(I{})), None>;
  else
    return !std::is_same_v<decltype(F::integers(I{}, I{})), None>;
}

// f(Formula<op>{}).
template <class F>
TESSERA_DEVICE auto visit_formula(UnaryOp op, F f) {
  switch (op) {
#define TESSERA_UNARY(name, ...) \
  case UnaryOp::name:            \
    return f(Formula<UnaryOp::name>{});
#include "tessera/kernels/unary.def"
  }
  return decltype(f(Formula<UnaryOp::copy>{}))();
}
template <class F>
TESSERA_DEVICE auto visit_formula(BinaryOp op, F f) {
  switch (op) {
#define TESSERA_BINARY(name, ...) \
  case BinaryOp::name:            \
    return f(Formula<BinaryOp::name>{});
#include "tessera/kernels/binary.def"
  }
  return decltype(f(Formula<BinaryOp::add>{}))();
}

}  // namespace tessera::kernels
