// Attention, forward and backward, against the textbook formulas in double precision.
#include "tests/kernels/bounded.hpp"
#include "tests/kernels/heads.hpp"

namespace kernel_test {
namespace {

struct Attended {
  Heads s;
  HeadView q, k, v, o;
  double scale;

  // exp(score - lse) of query t of head h over its keys; their lse in *lse.
  std::vector<double> weights(const std::vector<double>& qs, const std::vector<double>& ks,
                              std::int64_t b, std::int64_t t, std::int64_t h, double* lse) const {
    const std::int64_t keys = s.causal ? t + 1 : s.length;
    std::vector<double> p;
    double top = -std::numeric_limits<double>::infinity(), total = 0;
    const double* query = q(qs, b, t, h);
    for (std::int64_t j = 0; j < keys; ++j) {
      const double* key = k(ks, b, j, h / (s.heads / s.kv_heads));
      double score = 0;
      for (std::int64_t d = 0; d < s.dim; ++d) score += query[d] * key[d];
      p.push_back(scale * score);
      top = std::max(top, p.back());
    }
    for (double& x : p) total += x = std::exp(x - top);
    for (double& x : p) x /= total;
    *lse = top + std::log(total);
    return p;
  }
};

// With u the rounding of the computing type, and |q|, |k| <= r, |v|, |do| <= 1:
// - A score is a sum of D products of at most r^2 / sqrt(D), so |score| <= S = sqrt(D) r^2, and it
//   is off by (D + 2) u S; exp adds 4 u and, of its argument's difference, 2 u S. A probability, of
//   which the sum of T + 1 terms is the denominator, is off by a factor of 1 + e,
//   e = (2 (D + 4) S + T + 8) u: that is what o is off by.
// - p = exp(score - lse) is off by e as well, T of which is for the rounding of lse; do v and delta
// are sums of D products, at most D and
//   off by (D + 2) u D, so ds, at most 2 p D, by 2 p D (e + 2 (D + 2) u). The p of a query add up
//   to 1: dq, scale times a sum of ds k, is off by 2 r sqrt(D) (e + 2 (D + T + 4) u).
// - The p that a key gets from all queries add up to at most P = group sum of e^(2S) / (t + 1), and
//   not to more than group T: dv is off by P (e + N u), N = group T terms, and dk by
//   2 r sqrt(D) P (e + 2 (D + N + 4) u).
// f64, in which the reference rounds as often, counts twice.
//
// What a library may compute (attention_suits_library) may also round what enters a product, p and
// ds, to the 16-bit type, off by its w of their size, and add up on tensor cores, which cut off
// instead of rounding: each sum and exp counts twice. So a factor 1 + e is one of 1 + 2 e + w: of
// p, of ds, and so of o, dq, dk and dv. Each head's part of dk and dv may be rounded before the
// group's are added: one more w of the sum of their sizes, which is at most P for dv and 2 r
// sqrt(D) P for dk. What is too small for a normal 16-bit number is off by that type's smallest: a
// sum's terms and parts by one each, times at most 1 for v and do and r for k and q.
struct AttentionBounds {
  double o, lse, dq, dk, dv;

  AttentionBounds(const Heads& s, double r, DType dtype) {
    const double u = dtype == f64 ? 2 * epsilon(f64) : epsilon(f32);
    const double D = static_cast<double>(s.dim), T = static_cast<double>(s.length),
                 root = std::sqrt(D), S = root * r * r;
    const double group = static_cast<double>(s.heads / s.kv_heads), N = group * T;
    const double P = std::min(N, group * std::exp(2 * S) * (1 + std::log(T)));
    const double e = (2 * (D + 4) * S + T + 8) * u;
    const bool library = attention_suits_library(s.dim, dtype);
    const double w = library ? epsilon(dtype) : 0, times = library ? 2 : 1;
    const double parts = group > 1 ? w : 0, least = library ? smallest(dtype) : 0;
    o = times * e + w + T * least;
    lse = times * (e + 2 * (S + std::log(T + 1)) * u);
    dq = 2 * r * root * (times * (e + 2 * (D + T + 4) * u) + w) + T * r * least;
    dv = P * (times * (e + N * u) + w + parts) + (N + group) * least;
    dk = 2 * r * root * P * (times * (e + 2 * (D + N + 4) * u) + w + parts) +
         (N * r + group) * least;
  }
};

struct Gradients {
  std::vector<double> dq, dk, dv;
};

// The textbook's gradients, of the o and lse that the kernel reads.
Gradients gradients_of(const Attended& a, const Operand& q, const Operand& k, const Operand& v,
                       const Operand& o, const Operand& d_o) {
  const Heads& s = a.s;
  const std::vector<double> qs = contents(q), ks = contents(k), vs = contents(v), os = contents(o),
                            ds = contents(d_o);
  Gradients g{std::vector<double>(qs.size()), std::vector<double>(ks.size()),
              std::vector<double>(vs.size())};
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.heads; ++h)
      for (std::int64_t t = 0; t < s.length; ++t) {
        double lse = 0, delta = 0;
        const std::vector<double> p = a.weights(qs, ks, b, t, h, &lse);
        const double *grad = a.o(ds, b, t, h), *out = a.o(os, b, t, h), *query = a.q(qs, b, t, h);
        double* d_query = g.dq.data() + a.q.at(b, t, h);
        for (std::int64_t d = 0; d < s.dim; ++d) delta += grad[d] * out[d];
        for (std::int64_t j = 0; j < std::ssize(p); ++j) {
          const std::int64_t kv_head = h / (s.heads / s.kv_heads), at = a.k.at(b, j, kv_head);
          const double *key = a.k(ks, b, j, kv_head), *value = a.v(vs, b, j, kv_head);
          double *d_key = g.dk.data() + at, *d_value = g.dv.data() + a.v.at(b, j, kv_head);
          double back = 0;
          for (std::int64_t d = 0; d < s.dim; ++d) back += grad[d] * value[d];
          const double weight = p[static_cast<std::size_t>(j)],
                       d_score = a.scale * weight * (back - delta);
          for (std::int64_t d = 0; d < s.dim; ++d) {
            d_value[d] += weight * grad[d];
            d_query[d] += d_score * key[d];
            d_key[d] += d_score * query[d];
          }
        }
      }
  return g;
}

void compare_heads(Case& c, const Operand& out, const HeadView& view, std::int64_t batch,
                   std::int64_t heads, const std::vector<double>& expected, double bound) {
  const DType dtype = out.dtype();
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t t = 0; t < view.length; ++t)
      for (std::int64_t i = view.at(b, t, 0); i < view.at(b, t, heads); ++i) {
        const double x = expected[static_cast<std::size_t>(i)];
        const double last =
            size_bytes(dtype) == 2 ? epsilon(dtype) * (std::abs(x) + bound) + smallest(dtype) : 0;
        c.near(out, i, x, bound + last);
      }
}

void check_attention(Case& c, DType dtype, const Heads& s) {
  const double root = std::sqrt(static_cast<double>(s.dim));
  const double r = s.range > 0 ? s.range : 1 / std::sqrt(root);
  const std::int64_t item = static_cast<std::int64_t>(size_bytes(dtype)), d = s.dim,
                     bytes = shift_of(dtype, s.shifted);
  const auto count = [&](std::int64_t row) { return s.batch * s.length * row * d; };
  Operand& q = c.input(dtype, count(s.q_row()), -r, r, bytes);
  Operand& k = s.fused ? q : c.input(dtype, count(s.kv_heads), -r, r, bytes);
  Operand& v = s.fused ? q : c.input(dtype, count(s.kv_heads), -1, 1, bytes);
  const std::int64_t k_first = s.fused ? s.heads : 0, v_first = s.fused ? s.heads + s.kv_heads : 0;
  if (s.fused)
    for (std::int64_t i = 0; i < q.size(); ++i)
      if (i / d % s.q_row() >= v_first) q.set(i, c.uniform(-1, 1));
  Operand& o = c.output(dtype, count(s.heads), bytes);
  Operand& lse = c.output(computed_in(dtype), s.batch * s.heads * s.length);
  const auto at = [&](Operand& x, Side side, std::int64_t first) {
    return static_cast<void*>(x.at<std::byte>(side) + first * d * item);
  };
  const auto scale = static_cast<float>(1 / root);
  // What forward and backward are told alike.
  const auto filled = [&](auto args, Side side) {
    args.q = at(q, side, 0);
    args.k = at(k, side, k_first);
    args.v = at(v, side, v_first);
    args.lse = lse.at(side);
    args.scale = scale;
    args.batch = static_cast<std::int32_t>(s.batch);
    args.length = static_cast<std::int32_t>(s.length);
    args.heads = as_u16(s.heads);
    args.kv_heads = as_u16(s.kv_heads);
    args.head_dim = as_u16(d);
    args.q_row = as_u16(s.q_row());
    args.k_row = args.v_row = as_u16(s.kv_row());
    args.dtype = dtype;
    args.causal = s.causal;
    return args;
  };
  c.compute([&](const Kernels& kernels, Side side, Exec& exec) {
    AttentionArgs args = filled(AttentionArgs{}, side);
    args.o = o.at(side);
    kernels.attention(args, exec);
  });
  const auto view = [&](std::int64_t row, std::int64_t first) {
    return HeadView{row, first, s.length, d};
  };
  const Attended a{s,
                   view(s.q_row(), 0),
                   view(s.kv_row(), k_first),
                   view(s.kv_row(), v_first),
                   view(s.heads, 0),
                   static_cast<double>(scale)};
  const AttentionBounds bounds(s, r, dtype);
  const std::vector<double> qs = contents(q), ks = contents(k), vs = contents(v);
  std::vector<double> outputs(static_cast<std::size_t>(o.size()));
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.heads; ++h)
      for (std::int64_t t = 0; t < s.length; ++t) {
        double value = 0;
        const std::vector<double> p = a.weights(qs, ks, b, t, h, &value);
        c.near(lse, (b * s.heads + h) * s.length + t, value, bounds.lse);
        double* out = outputs.data() + a.o.at(b, t, h);
        for (std::int64_t j = 0; j < std::ssize(p); ++j)
          for (std::int64_t i = 0; i < d; ++i)
            out[i] += p[static_cast<std::size_t>(j)] * a.v(vs, b, j, h / (s.heads / s.kv_heads))[i];
        // The backward pass reads what the forward pass gives, rounded once.
        lse.set((b * s.heads + h) * s.length + t, value);
      }
  compare_heads(c, o, a.o, s.batch, s.heads, outputs, bounds.o);
  for (std::int64_t i = 0; i < o.size(); ++i) o.set(i, outputs[static_cast<std::size_t>(i)]);

  Operand& d_o = c.input(dtype, count(s.heads), -1, 1, bytes);
  const Gradients g = gradients_of(a, q, k, v, o, d_o);
  for (const bool deterministic : {true, false}) {
    if (!deterministic && !attention_suits_library(d, dtype)) continue;
    Operand& dq = c.output(dtype, count(s.q_row()), bytes);
    Operand& dk = s.fused ? dq : c.output(dtype, count(s.kv_heads), bytes);
    Operand& dv = s.fused ? dq : c.output(dtype, count(s.kv_heads), bytes);
    const Workspace workspace(
        c.target(), c.target().driver
                        ? attention_workspace_bytes(s.batch, s.length, s.heads, s.kv_heads, d,
                                                    dtype, deterministic)
                        : 0);
    c.compute([&](const Kernels& kernels, Side side, Exec& exec) {
      AttentionBackwardArgs args = filled(AttentionBackwardArgs{}, side);
      args.dq = at(dq, side, 0);
      args.dk = at(dk, side, k_first);
      args.dv = at(dv, side, v_first);
      args.o = o.at(side);
      args.d_o = d_o.at(side);
      args.workspace = workspace.at(side);
      args.dq_row = args.q_row;
      args.dk_row = args.dv_row = args.k_row;
      args.deterministic = deterministic;
      kernels.attention_backward(args, exec);
    });
    compare_heads(c, dq, a.q, s.batch, s.heads, g.dq, bounds.dq);
    compare_heads(c, dk, a.k, s.batch, s.kv_heads, g.dk, bounds.dk);
    compare_heads(c, dv, a.v, s.batch, s.kv_heads, g.dv, bounds.dv);
  }
  c.next();
}

}  // namespace

TESSERA_CASE("attention", "lengths around a tile, every dtype") {
  for (const DType dtype : {f32, bf16, f16})
    for (const std::int64_t length : {1, 63, 64, 65, 130})
      check_attention(c, dtype, {1, length, 1, 1, 64});
  for (const std::int64_t length : {1, 31, 33, 70}) check_attention(c, f64, {1, length, 1, 1, 16});
}

TESSERA_CASE("attention", "head sizes") {
  for (const std::int64_t dim : {1, 3, 8, 65, 80, 128, 200, 256})
    check_attention(c, f32, {1, 67, 1, 1, dim});
  for (const std::int64_t dim : {7, 24, 96, 256}) check_attention(c, bf16, {1, 66, 1, 1, dim});
  check_attention(c, f64, {1, 34, 1, 1, 256});
  check_attention(c, f16, {1, 129, 1, 1, 256, false});
}

TESSERA_CASE("attention", "grouped queries, batches, no mask, a fused projection, misaligned") {
  for (const DType dtype : kFloats) {
    check_attention(c, dtype, {2, 70, 4, 2, 16});
    check_attention(c, dtype, {1, 66, 3, 1, 8, false});
    check_attention(c, dtype, {2, 37, 4, 2, 16, true, true});
    check_attention(c, dtype, {1, 131, 2, 1, 20, true, true});
    check_attention(c, dtype, {1, 37, 2, 1, 8, true, false, 0, true});
  }
}

// More tiles than a kernel has stages for, of each head in turn.
TESSERA_CASE("attention", "lengths of several tiles") {
  check_attention(c, bf16, {1, 395, 2, 1, 64});
  check_attention(c, bf16, {1, 331, 2, 1, 128});
  check_attention(c, f16, {1, 330, 1, 1, 40, false});
}

TESSERA_CASE("attention", "any shape that tensor cores take") {
  for (const DType dtype : {bf16, f16})
    for (int i = 0; i < 2; ++i) {
      const std::int64_t kv_heads = c.integer(1, 2);
      check_attention(c, dtype,
                      {c.integer(1, 2), c.integer(1, 200), kv_heads * c.integer(1, 3), kv_heads,
                       8 * c.integer(1, 16), c.integer(0, 1) == 1, c.integer(0, 1) == 1});
    }
}

// One key has nearly all of the weight, and the maximum moves from tile to tile.
TESSERA_CASE("attention", "scores of up to 30") {
  for (const DType dtype : {f32, bf16})
    check_attention(c, dtype, {1, 140, 1, 1, 16, true, false, 2.7});
}

TESSERA_CASE("attention", "scores of 200 neither overflow nor lose the largest") {
  const std::int64_t length = 150, dim = 16;
  Operand &q = c.input(f32, length * dim, 0, 0), &k = c.input(f32, length * dim, 0, 0),
          &v = c.input(f32, length * dim, -1, 1), &o = c.output(f32, length * dim),
          &lse = c.output(f32, length);
  for (std::int64_t t = 0; t < length; ++t) q.set(t * dim, 200);
  k.set(0, 1);
  c.compute([&](const Kernels& kernels, Side side, Exec& exec) {
    kernels.attention({.o = o.at(side),
                       .lse = lse.at(side),
                       .q = q.at(side),
                       .k = k.at(side),
                       .v = v.at(side),
                       .scale = 1,
                       .batch = 1,
                       .length = static_cast<std::int32_t>(length),
                       .heads = 1,
                       .kv_heads = 1,
                       .head_dim = static_cast<std::uint16_t>(dim),
                       .q_row = 1,
                       .k_row = 1,
                       .v_row = 1,
                       .dtype = f32,
                       .causal = true},
                      exec);
  });
  // exp(200 - 200) is 1, the other weights are exp(-200): the output is the first value, over a
  // sum that is 1.
  for (std::int64_t i = 0; i < o.size(); ++i)
    c.near(o, i, v.get(i % dim), 4 * epsilon(f32) * std::abs(v.get(i % dim)));
  for (std::int64_t t = 0; t < length; ++t) c.near(lse, t, 200, 4 * epsilon(f32) * 200);
}

TESSERA_CASE("attention", "nothing at all") {
  Operand& o = c.updated(f32, 4);
  c.compute([&](const Kernels& kernels, Side side, Exec& exec) {
    kernels.attention({.o = o.at(side),
                       .lse = o.at(side),
                       .q = o.at(side),
                       .k = o.at(side),
                       .v = o.at(side),
                       .scale = 1,
                       .batch = 0,
                       .length = 5,
                       .heads = 1,
                       .kv_heads = 1,
                       .head_dim = 4,
                       .q_row = 1,
                       .k_row = 1,
                       .v_row = 1,
                       .dtype = f32,
                       .causal = true},
                      exec);
  });
  for (std::int64_t i = 0; i < o.size(); ++i) c.near(o, i, o.get(i), 0);
}

}  // namespace kernel_test
