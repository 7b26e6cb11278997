// The selective scan of Mamba as an operation of one's own: two results, five inputs that have
// gradients, and two dtypes, that of activations and that of A and the states.
//
//   h[t] = exp(delta[t] A) h[t-1] + delta[t] B[t] u[t]     y[t] = sum over n of C[t] h[t]
//
// of u and delta [batch, T, D], A [D, N], B and C [batch, T, N], h [batch, D, N]; h before t = 0 is
// 0. Source: Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces", 2023.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "tessera/autograd/custom_op.hpp"

namespace tessera::testing {

struct ScanSizes {
  std::int64_t T, D, N;
};

// Of one sequence: y, the last state, and all of them, for backward.
template <class X, class S>
void scan_forward(const ScanSizes& z, X* y, S* last, S* states, const X* u, const X* delta,
                  const S* a, const X* b, const X* c) {
  for (std::int64_t d = 0; d < z.D; ++d) {
    for (std::int64_t t = 0; t < z.T; ++t) {
      const S u_t = static_cast<S>(u[t * z.D + d]), delta_t = static_cast<S>(delta[t * z.D + d]);
      S sum = 0;
      for (std::int64_t n = 0; n < z.N; ++n) {
        S* const h = states + (t * z.D + d) * z.N + n;
        const S before = t == 0 ? S(0) : h[-z.D * z.N];
        *h = std::exp(delta_t * a[d * z.N + n]) * before +
             delta_t * static_cast<S>(b[t * z.N + n]) * u_t;
        sum += static_cast<S>(c[t * z.N + n]) * *h;
      }
      y[t * z.D + d] = static_cast<X>(sum);
    }
    for (std::int64_t n = 0; n < z.N; ++n)
      last[d * z.N + n] = z.T == 0 ? S(0) : states[((z.T - 1) * z.D + d) * z.N + n];
  }
}

// Its five gradients: what a sequence adds to A's is its own.
template <class X, class S>
void scan_backward(const ScanSizes& z, S* d_u, S* d_delta, S* d_a, S* d_b, S* d_c, const X* d_y,
                   const S* d_last, const S* states, const X* u, const X* delta, const S* a,
                   const X* b, const X* c) {
  std::fill_n(d_u, z.T * z.D, S(0));
  std::fill_n(d_delta, z.T * z.D, S(0));
  std::fill_n(d_a, z.D * z.N, S(0));
  std::fill_n(d_b, z.T * z.N, S(0));
  std::fill_n(d_c, z.T * z.N, S(0));
  for (std::int64_t d = 0; d < z.D; ++d) {
    for (std::int64_t n = 0; n < z.N; ++n) {
      S g = d_last[d * z.N + n];  // of h[t]
      const S rate = a[d * z.N + n];
      for (std::int64_t t = z.T - 1; t >= 0; --t) {
        const std::int64_t x = t * z.D + d, at = t * z.N + n;
        const S* const h = states + x * z.N + n;
        const S before = t == 0 ? S(0) : h[-z.D * z.N], u_t = static_cast<S>(u[x]),
                delta_t = static_cast<S>(delta[x]), b_t = static_cast<S>(b[at]),
                decay = std::exp(delta_t * rate), out = static_cast<S>(d_y[x]);
        g += out * static_cast<S>(c[at]);
        d_c[at] += out * *h;
        d_a[d * z.N + n] += g * before * decay * delta_t;
        d_b[at] += g * delta_t * u_t;
        d_delta[x] += g * (before * decay * rate + b_t * u_t);
        d_u[x] += g * delta_t * b_t;
        g *= decay;
      }
    }
  }
}

struct ScanResults {
  Tensor y, last;  // [batch, T, D], [batch, D, N]
};

// X: of u, delta, B, C and y; S: of A and the states.
template <class X, class S>
ScanResults selective_scan(const Tensor& u, const Tensor& delta, const Tensor& a, const Tensor& b,
                           const Tensor& c) {
  using Op = CustomOp;
  const Op op("selective_scan");
  const std::int64_t batch = u.size(0), T = u.size(1), D = u.size(2), N = a.size(1);
  const ScanSizes sizes{T, D, N};
  // Of sequence i those of a pointer to all of them.
  const auto forward = [sizes](std::int64_t i, X* y, S* last, S* states, const X* u, const X* delta,
                               const S* a, const X* b, const X* c) {
    const auto [T, D, N] = sizes;
    scan_forward(sizes, y + i * T * D, last + i * D * N, states + i * T * D * N, u + i * T * D,
                 delta + i * T * D, a, b + i * T * N, c + i * T * N);
  };
  const auto [y, last, states] =
      op.run(batch, forward, Op::Out<X>{{batch, T, D}}, Op::Out<S>{{batch, D, N}},
             Op::Out<S>{{batch, T, D, N}}, Op::In<X>{u}, Op::In<X>{delta}, Op::In<S>{a},
             Op::In<X>{b}, Op::In<X>{c});
  using autograd::Saved;
  const auto [with_history, of_last] = op.record(
      {u, delta, a, b, c}, std::array{y, last},
      [op, sizes, batch, states = Saved(states), u = Saved(u), delta = Saved(delta), a = Saved(a),
       b = Saved(b), c = Saved(c)](std::span<const Tensor> g, autograd::Gradients& out) {
        const auto backward = [sizes](std::int64_t i, S* d_u, S* d_delta, S* d_a, S* d_b, S* d_c,
                                      const X* d_y, const S* d_last, const S* states, const X* u,
                                      const X* delta, const S* a, const X* b, const X* c) {
          const auto [T, D, N] = sizes;
          scan_backward(sizes, d_u + i * T * D, d_delta + i * T * D, d_a + i * D * N,
                        d_b + i * T * N, d_c + i * T * N, d_y + i * T * D, d_last + i * D * N,
                        states + i * T * D * N, u + i * T * D, delta + i * T * D, a, b + i * T * N,
                        c + i * T * N);
        };
        const auto& [T, D, N] = sizes;
        const auto [d_u, d_delta, d_a, d_b, d_c] = op.run(
            batch, backward, Op::Out<S>{{batch, T, D}}, Op::Out<S>{{batch, T, D}},
            Op::Out<S>{{batch, D, N}}, Op::Out<S>{{batch, T, N}}, Op::Out<S>{{batch, T, N}},
            Op::In<X>{g[0]}, Op::In<S>{g[1]}, Op::In<S>{states.get()}, Op::In<X>{u.get()},
            Op::In<X>{delta.get()}, Op::In<S>{a.get()}, Op::In<X>{b.get()}, Op::In<X>{c.get()});
        out.set(0, raw::cast(d_u, dtype_of<X>()));
        out.set(1, raw::cast(d_delta, dtype_of<X>()));
        out.set(2, raw::sum_to(d_a, {D, N}));
        out.set(3, raw::cast(d_b, dtype_of<X>()));
        out.set(4, raw::cast(d_c, dtype_of<X>()));
      });
  return {with_history, of_last};
}

}  // namespace tessera::testing
