#include <algorithm>
#include <cmath>

#include "tests/cuda/case.hpp"

using namespace cuda_test;

namespace {

struct Sizes {
  std::int64_t batch, length, heads, kv_heads, dim;
  bool causal = true;
  bool fused = false;      // q, k and v, and their gradients, are views of one projection
  double range = 0;        // of q and k; 0: such that scores lie within 1
  std::int64_t shift = 0;  // elements that every array is off a 16-byte boundary
};

std::uint16_t narrow(std::int64_t x) { return static_cast<std::uint16_t>(x); }

// With u the rounding of the computing type, and |q|, |k| <= r, |v|, |do| <= 1:
// - A score is a sum of D products of at most r^2 / sqrt(D), so |score| <= S = sqrt(D) r^2, and it
//   is off by (D + 2) u S on either side; exp adds 2 ulp at most (CUDA C++ Programming Guide,
//   mathematical functions: expf 1 ulp, logf 1 ulp) and 2 u of its argument's difference. A
//   probability, of which the sum of T + 1 terms is the denominator, is off by a factor of
//   1 + e, e = 2 (2 (D + 4) S + T + 8) u between the two sides: that is what o is off by.
// - p = exp(score - lse) is off by e as well; do v and delta are sums of D products, at most D and
//   off by (D + 2) u D on either side, so ds, at most 2 p D, by 2 p D (e + 2 (D + 2) u). The p of a
//   query add up to 1: dq, scale times a sum of ds k, by 2 r sqrt(D) (e + 2 (D + T + 4) u).
// - The p that a key gets from all queries add up to at most P = group sum of e^(2S) / (t + 1), and
//   not to more than group T: dv is off by P (e + N u), N = group T terms, and dk by
//   2 r sqrt(D) P (e + 2 (D + N + 4) u).
// 16-bit results are rounded once by both: 2 epsilon of their own beside that.
void check(Case& c, DType dtype, const Sizes& s) {
  const double root = std::sqrt(static_cast<double>(s.dim)), T = static_cast<double>(s.length);
  const double r = s.range > 0 ? s.range : 1 / std::sqrt(root);
  const std::int64_t item = static_cast<std::int64_t>(size_bytes(dtype)), bytes = s.shift * item;
  const std::int64_t row = s.fused ? s.heads + 2 * s.kv_heads : 0;
  const std::int64_t tokens = s.batch * s.length, d = s.dim;
  const std::int64_t q_row = s.fused ? row : s.heads, k_row = s.fused ? row : s.kv_heads;
  const auto count = [&](std::int64_t heads) { return tokens * heads * d; };
  const DType statistics = dtype == f64 ? f64 : f32;
  Operand& q = c.input(dtype, count(q_row), -r, r, bytes);
  Operand& k = s.fused ? q : c.input(dtype, count(s.kv_heads), -r, r, bytes);
  Operand& v = c.input(dtype, count(k_row), -1, 1, bytes);
  Operand& o = c.output(dtype, count(s.heads), bytes);
  Operand& lse = c.output(statistics, s.batch * s.heads * s.length);
  const auto at = [&](Operand& x, Side side, std::int64_t heads) {
    return static_cast<void*>(x.at<std::byte>(side) + (s.fused ? heads * d * item : 0));
  };
  // What forward and backward are told alike.
  const auto filled = [&](auto args, Side side) {
    args.q = at(q, side, 0);
    args.k = at(k, side, s.heads);
    args.v = at(v, side, s.heads + s.kv_heads);
    args.lse = lse.at(side);
    args.scale = static_cast<float>(1 / root);
    args.batch = static_cast<std::int32_t>(s.batch);
    args.length = static_cast<std::int32_t>(s.length);
    args.heads = narrow(s.heads);
    args.kv_heads = narrow(s.kv_heads);
    args.head_dim = narrow(d);
    args.q_row = narrow(q_row);
    args.k_row = args.v_row = narrow(k_row);
    args.dtype = dtype;
    args.causal = s.causal;
    return args;
  };
  c.run([&](const Kernels& kernels, Side side, Exec& exec) {
    AttentionArgs args = filled(AttentionArgs{}, side);
    args.o = o.at(side);
    kernels.attention(args, exec);
  });
  const double u = epsilon(statistics), S = root * r * r, D = static_cast<double>(d);
  const double e = 2 * (2 * (D + 4) * S + T + 8) * u,
               own = dtype == statistics ? 0 : 2 * epsilon(dtype);
  c.close(o, own, e);
  c.close(lse, 0, e + 2 * (S + std::log(T + 1)) * u);

  // The reference's o and lse are the inputs of both.
  Operand& d_o = c.input(dtype, count(s.heads), -1, 1, bytes);
  Operand& dq = c.output(dtype, count(q_row), bytes);
  Operand& dk = s.fused ? dq : c.output(dtype, count(s.kv_heads), bytes);
  Operand& dv = s.fused ? dq : c.output(dtype, count(s.kv_heads), bytes);
  c.run([&](const Kernels& kernels, Side side, Exec& exec) {
    AttentionBackwardArgs args = filled(AttentionBackwardArgs{}, side);
    args.dq = at(dq, side, 0);
    args.dk = at(dk, side, s.heads);
    args.dv = at(dv, side, s.heads + s.kv_heads);
    args.o = o.at(side);
    args.d_o = d_o.at(side);
    args.dq_row = args.q_row;
    args.dk_row = args.dv_row = args.k_row;
    kernels.attention_backward(args, exec);
  });
  const double group = static_cast<double>(s.heads / s.kv_heads), N = group * T;
  const double P = std::min(N, group * std::exp(2 * S) * (1 + std::log(T)));
  const double of_dq = 2 * r * root * (e + 2 * (D + T + 4) * u), of_dv = P * (e + N * u),
               of_dk = 2 * r * root * P * (e + 2 * (D + N + 4) * u);
  if (s.fused) return c.close(dq, own, std::max({of_dq, of_dk, of_dv}));
  c.close(dq, own, of_dq);
  c.close(dk, own, of_dk);
  c.close(dv, own, of_dv);
}

}  // namespace

TESSERA_CASE("attention", "lengths around a tile, every dtype") {
  for (const DType dtype : {f32, bf16, f16})
    for (const std::int64_t length : {1, 63, 64, 65, 130}) check(c, dtype, {1, length, 1, 1, 64});
  for (const std::int64_t length : {1, 31, 33, 70}) check(c, f64, {1, length, 1, 1, 16});
}

TESSERA_CASE("attention", "head sizes") {
  for (const std::int64_t dim : {1, 3, 8, 65, 80, 128, 200, 256}) check(c, f32, {1, 67, 1, 1, dim});
  for (const std::int64_t dim : {7, 24, 96, 256}) check(c, bf16, {1, 66, 1, 1, dim});
  check(c, f64, {1, 34, 1, 1, 256});
}

TESSERA_CASE("attention", "grouped queries, batches, no mask, a fused projection, misaligned") {
  for (const DType dtype : {f32, f16, f64}) {
    check(c, dtype, {2, 70, 4, 2, 16});
    check(c, dtype, {1, 66, 3, 1, 8, false});
    check(c, dtype, {2, 37, 4, 2, 16, true, true});
    check(c, dtype, {1, 37, 2, 1, 8, true, false, 0, 1});
  }
}

// One key has nearly all of the weight, and the maximum moves from tile to tile.
TESSERA_CASE("attention", "scores of up to 30") {
  for (const DType dtype : {f32, bf16}) check(c, dtype, {1, 140, 1, 1, 16, true, false, 2.7});
}

TESSERA_CASE("attention", "nothing at all") {
  Operand& o = c.output(f32, 4);
  c.run([&](const Kernels& kernels, Side side, Exec& exec) {
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
  c.equal(o);
}
