// The formulas of updates.def as code. One text serves the host's vectors, a GPU, and an optimizer
// of your own: V is host::Vec<float>, cuda::Value<float>, or Element below.
//
// An Update is made once for a segment, from the step's scalars and the segment's rates: anything
// with lr_factor and weight_decay. It is then called with an element's value p, gradient g and
// moments. It changes the moments, and returns the new p. `moments` is null if nothing is kept.
#pragma once

#include <cmath>
#include <type_traits>

#include "tessera/kernels/updates.hpp"

#ifndef TESSERA_DEVICE  // what gpu.hpp puts before a function of a kernel
#define TESSERA_DEVICE inline
#endif

namespace tessera::kernels {

template <UpdateOp op, class V>
struct Update;

// One element on the CPU, for FlatRange::apply. Its bits are those of the library's vectors on two
// conditions. The vectors have an fma, as from x86-64-v3 on. And your compiler contracts no product
// into an fma of its own: say -ffp-contract=off beside flags that allow that, such as
// -march=native.
struct Element {
  float v = 0;

  Element() = default;
  explicit Element(float x) : v(x) {}
  friend Element operator+(Element a, Element b) { return Element(a.v + b.v); }
  friend Element operator-(Element a, Element b) { return Element(a.v - b.v); }
  friend Element operator*(Element a, Element b) { return Element(a.v * b.v); }
  friend Element operator/(Element a, Element b) { return Element(a.v / b.v); }
  friend Element fma(Element a, Element b, Element c) { return Element(std::fma(a.v, b.v, c.v)); }
  friend Element sqrt(Element a) { return Element(std::sqrt(a.v)); }
  friend Element rounded_product(Element a, Element b) { return a * b; }  // never part of an fma
};

// AdamW as PyTorch defines it.
// Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
//   p *= 1 - lr weight_decay;   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
//   p -= lr / bias_correction1 * m / (sqrt(v) / sqrt(bias_correction2) + eps)
template <class V>
struct Update<UpdateOp::adamw, V> {
  V beta1, beta2, rest1, rest2, eps, rate, root, decay;

  template <class Rates>
  TESSERA_DEVICE Update(const UpdateScalars& s, const Rates& of)
      : beta1(s.beta1),
        beta2(s.beta2),
        rest1(1 - s.beta1),
        rest2(1 - s.beta2),
        eps(s.eps),
        rate(s.lr * of.lr_factor / s.bias_correction1),
        root(1 / std::sqrt(s.bias_correction2)),
        decay(1 - s.lr * of.lr_factor * of.weight_decay) {}
  TESSERA_DEVICE V operator()(V p, V g, V* moments) const {
    const V m = fma(beta1, moments[0], rest1 * g);
    const V v = fma(beta2, moments[1], rest2 * g * g);
    moments[0] = m;
    moments[1] = v;
    return p * decay - rate * m / fma(sqrt(v), root, eps);
  }
};

// SGD with momentum as PyTorch defines it.
//   g' = g + weight_decay p;   b = momentum b + (1 - dampening) g'
//   p -= lr b, or with Nesterov's momentum lr (g' + momentum b)
template <class V>
struct Update<UpdateOp::sgd, V> {
  V rate, momentum, rest, decay;
  bool nesterov;

  template <class Rates>
  TESSERA_DEVICE Update(const UpdateScalars& s, const Rates& of)
      : rate(s.lr * of.lr_factor),
        momentum(s.momentum),
        rest(1 - s.dampening),
        decay(of.weight_decay),
        nesterov(s.nesterov != 0) {}
  TESSERA_DEVICE V operator()(V p, V g, V* moments) const {
    V step = fma(decay, p, g);
    if (moments != nullptr) {
      const V b = moments[0] = fma(momentum, moments[0], rest * step);
      step = nesterov ? fma(momentum, b, step) : b;
    }
    return p - rounded_product(rate, step);
  }
};

// Muon's two passes, before a matrix is orthogonalised and after it.
//   with its momentum:  m = momentum m + (1 - momentum) g;   p *= 1 - lr weight_decay
//   without, where g is the orthogonalised matrix:           p -= lr g
template <class V>
struct Update<UpdateOp::muon, V> {
  V rate, momentum, rest, decay;

  template <class Rates>
  TESSERA_DEVICE Update(const UpdateScalars& s, const Rates& of)
      : rate(s.lr * of.lr_factor),
        momentum(s.momentum),
        rest(1 - s.momentum),
        decay(1 - s.lr * of.lr_factor * of.weight_decay) {}
  TESSERA_DEVICE V operator()(V p, V g, V* moments) const {
    if (moments == nullptr) return p - rounded_product(rate, g);
    moments[0] = fma(momentum, moments[0], rest * g);
    return p * decay;
  }
};

// `moments` is the most that an update keeps; if `fewest` is 0, it may keep none.
template <UpdateOp op_, int fewest_, int moments_>
struct UpdateTag {
  static constexpr UpdateOp op = op_;
  static constexpr int fewest = fewest_, moments = moments_;
};

// Calls f(UpdateTag of op).
template <class F>
void visit_update(UpdateOp op, F f) {
  switch (op) {
#define TESSERA_OP(name, fewest, most) \
  case UpdateOp::name:                 \
    return f(UpdateTag<UpdateOp::name, fewest, most>{});
#include "tessera/kernels/updates.def"
  }
}

}  // namespace tessera::kernels
