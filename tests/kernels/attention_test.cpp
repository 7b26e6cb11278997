// Attention, forward and backward, against the textbook formulas in double precision.
#include "tests/kernels/support.hpp"

using namespace kernel_test;

namespace {

struct Shape {
  std::int64_t batch, length, heads, kv_heads, dim;
  bool causal;
};

// The reference: all scores at once. Indices as in the contract; `row` is the width of a row in
// heads.
struct Reference {
  Shape s;
  std::vector<double> o, lse, dq, dk, dv;

  template <class Q, class K, class V, class D>
  Reference(const Shape& shape, double scale, Q q, K k, V v, D d_o) : s(shape) {
    o.assign(static_cast<std::size_t>(s.batch * s.length * s.heads * s.dim), 0);
    dq = o;
    lse.assign(static_cast<std::size_t>(s.batch * s.length * s.heads), 0);
    dk.assign(static_cast<std::size_t>(s.batch * s.length * s.kv_heads * s.dim), 0);
    dv = dk;
    std::vector<double> p(static_cast<std::size_t>(s.length)), dp(p);
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        const std::int64_t g = h / (s.heads / s.kv_heads);
        for (std::int64_t t = 0; t < s.length; ++t) {
          const std::int64_t keys = s.causal ? t + 1 : s.length;
          double total = 0, delta = 0;
          for (std::int64_t j = 0; j < keys; ++j) {
            double score = 0, back = 0;
            for (std::int64_t d = 0; d < s.dim; ++d) {
              score += scale * q(b, t, h, d) * k(b, j, g, d);
              back += d_o(b, t, h, d) * v(b, j, g, d);
            }
            p[static_cast<std::size_t>(j)] = std::exp(score);
            dp[static_cast<std::size_t>(j)] = back;
            total += std::exp(score);
          }
          lse[static_cast<std::size_t>((b * s.heads + h) * s.length + t)] = std::log(total);
          for (std::int64_t j = 0; j < keys; ++j)
            delta += (p[static_cast<std::size_t>(j)] /= total) * dp[static_cast<std::size_t>(j)];
          for (std::int64_t j = 0; j < keys; ++j) {
            const double weight = p[static_cast<std::size_t>(j)],
                         ds = scale * weight * (dp[static_cast<std::size_t>(j)] - delta);
            for (std::int64_t d = 0; d < s.dim; ++d) {
              o[at(b, t, h, d, s.heads)] += weight * v(b, j, g, d);
              dv[at(b, j, g, d, s.kv_heads)] += weight * d_o(b, t, h, d);
              dq[at(b, t, h, d, s.heads)] += ds * k(b, j, g, d);
              dk[at(b, j, g, d, s.kv_heads)] += ds * q(b, t, h, d);
            }
          }
        }
      }
    }
  }

  std::size_t at(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d,
                 std::int64_t row) const {
    return static_cast<std::size_t>(((b * s.length + t) * row + h) * s.dim + d);
  }
};

// q, k and v are views of one fused projection, dq, dk and dv of its gradient, as a model uses
// them.
void check(kernel_test::Random& random, const Shape& s, DType dtype) {
  const std::int64_t row = s.heads + 2 * s.kv_heads, tokens = s.batch * s.length;
  const DType stats = dtype == DType::f64 ? DType::f64 : DType::f32;
  const Array qkv = random.array(dtype, tokens * row * s.dim, -1, 1),
              d_o = random.array(dtype, tokens * s.heads * s.dim, -1, 1);
  Array o(dtype, tokens * s.heads * s.dim), lse(stats, tokens * s.heads),
      d_qkv(dtype, tokens * row * s.dim);
  d_qkv.fill(NAN);
  const auto head = [&](const Array& a, std::int64_t h) {
    return const_cast<std::byte*>(a.bytes.data()) +
           static_cast<std::size_t>(h * s.dim) * size_bytes(dtype);
  };
  const float scale = 1 / std::sqrt(static_cast<float>(s.dim));
  const auto width = static_cast<std::uint16_t>(row);
  const AttentionArgs forward{.o = o.data(),
                              .lse = lse.data(),
                              .q = head(qkv, 0),
                              .k = head(qkv, s.heads),
                              .v = head(qkv, s.heads + s.kv_heads),
                              .scale = scale,
                              .batch = static_cast<std::int32_t>(s.batch),
                              .length = static_cast<std::int32_t>(s.length),
                              .heads = static_cast<std::uint16_t>(s.heads),
                              .kv_heads = static_cast<std::uint16_t>(s.kv_heads),
                              .head_dim = static_cast<std::uint16_t>(s.dim),
                              .q_row = width,
                              .k_row = width,
                              .v_row = width,
                              .dtype = dtype,
                              .causal = s.causal};
  const AttentionBackwardArgs backward{.dq = head(d_qkv, 0),
                                       .dk = head(d_qkv, s.heads),
                                       .dv = head(d_qkv, s.heads + s.kv_heads),
                                       .q = forward.q,
                                       .k = forward.k,
                                       .v = forward.v,
                                       .o = o.data(),
                                       .d_o = d_o.data(),
                                       .lse = lse.data(),
                                       .scale = scale,
                                       .batch = forward.batch,
                                       .length = forward.length,
                                       .heads = forward.heads,
                                       .kv_heads = forward.kv_heads,
                                       .head_dim = forward.head_dim,
                                       .q_row = width,
                                       .k_row = width,
                                       .v_row = width,
                                       .dq_row = width,
                                       .dk_row = width,
                                       .dv_row = width,
                                       .dtype = dtype,
                                       .causal = s.causal};
  on_threads(
      [&](Exec& exec) {
        cpu_kernels().attention(forward, exec);
        cpu_kernels().attention_backward(backward, exec);
      },
      o, lse, d_qkv);

  const auto read = [&](std::int64_t first) {
    return [&, first](std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) {
      return qkv[((b * s.length + t) * row + first + h) * s.dim + d];
    };
  };
  const Reference r(s, static_cast<double>(scale), read(0), read(s.heads),
                    read(s.heads + s.kv_heads),
                    [&](std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) {
                      return d_o[((b * s.length + t) * s.heads + h) * s.dim + d];
                    });
  std::vector<double> expected(static_cast<std::size_t>(d_qkv.size()));
  for (std::int64_t token = 0; token < tokens; ++token)
    for (std::int64_t i = 0; i < row * s.dim; ++i) {
      const std::int64_t h = i / s.dim, q_size = s.heads * s.dim, kv_size = s.kv_heads * s.dim;
      expected[static_cast<std::size_t>(token * row * s.dim + i)] =
          h < s.heads ? r.dq[static_cast<std::size_t>(token * q_size + i)]
          : h < s.heads + s.kv_heads
              ? r.dk[static_cast<std::size_t>(token * kv_size + i - q_size)]
              : r.dv[static_cast<std::size_t>(token * kv_size + i - q_size - kv_size)];
    }
  // Scores are sums of D terms below 1 in magnitude, times the scale: their error e, of at most (D
  // + 8) roundings of sqrt(D), moves each weight by a factor exp(e). Outputs are means of values
  // below 1 under these weights. Gradients of keys sum over the group's heads and the queries.
  const double score = (static_cast<double>(s.dim) + 8) * std::sqrt(static_cast<double>(s.dim)) *
                       compute_epsilon(dtype);
  const double sum = (static_cast<double>(s.length) + 16) * compute_epsilon(dtype);
  require_close(o, r.o, epsilon(dtype), 2 * score + sum);
  require_close(lse, r.lse, 4 * compute_epsilon(dtype), score + sum);
  // do and o are rounded to the dtype before the backward pass reads them; delta inherits D such
  // errors, averaged.
  const double rounded = epsilon(dtype) * static_cast<double>(s.dim);
  const double terms = std::sqrt(static_cast<double>(s.heads / s.kv_heads * s.length));
  require_close(d_qkv, expected, epsilon(dtype), 4 * terms * (score + sum + rounded));
}

}  // namespace

TEST_CASE("attention agrees with the textbook for every dtype, shape and mask", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats) {
    for (const Shape& s : {Shape{1, 1, 1, 1, 1, true},
                           {2, 5, 2, 2, 3, true},
                           {1, 64, 2, 1, 32, true},
                           {1, 65, 3, 3, 16, true},
                           {2, 128, 4, 2, 32, true},
                           {1, 200, 4, 1, 20, true},
                           {1, 130, 2, 2, 128, true},
                           {1, 70, 2, 1, 64, false},
                           {2, 63, 3, 1, 7, false},
                           {1, 129, 1, 1, 256, false}}) {
      INFO(dtype << ": B " << s.batch << ", T " << s.length << ", H " << s.heads << ", Hkv "
                 << s.kv_heads << ", D " << s.dim << ", causal " << s.causal);
      check(random, s, dtype);
    }
  }
}

TEST_CASE("attention over large scores neither overflows nor loses the largest", "[kernels]") {
  // One key per query stands out by 200 in the exponent: the output is its value.
  const std::int64_t length = 150, dim = 16;
  std::vector<float> q(static_cast<std::size_t>(length * dim)), k(q), v(q), o(q),
      lse(static_cast<std::size_t>(length));
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (std::int64_t t = 0; t < length; ++t) {
    q[static_cast<std::size_t>(t * dim)] = 200;
    k[static_cast<std::size_t>(t * dim)] = t == 0 ? 1.0f : 0.0f;
    for (std::int64_t d = 0; d < dim; ++d)
      v[static_cast<std::size_t>(t * dim + d)] = static_cast<float>(random.uniform(-1, 1));
  }
  Exec exec;
  cpu_kernels().attention({.o = o.data(),
                           .lse = lse.data(),
                           .q = q.data(),
                           .k = k.data(),
                           .v = v.data(),
                           .scale = 1,
                           .batch = 1,
                           .length = static_cast<std::int32_t>(length),
                           .heads = 1,
                           .kv_heads = 1,
                           .head_dim = static_cast<std::uint16_t>(dim),
                           .q_row = 1,
                           .k_row = 1,
                           .v_row = 1,
                           .dtype = DType::f32,
                           .causal = true},
                          exec);
  for (std::int64_t t = 0; t < length; ++t)
    for (std::int64_t d = 0; d < dim; ++d)
      REQUIRE(o[static_cast<std::size_t>(t * dim + d)] ==
              Approx(v[static_cast<std::size_t>(d)]).epsilon(1e-6));
}
