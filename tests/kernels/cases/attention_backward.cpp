// Attention's backward pass over numbers that make its formula exact.
#include <cmath>
#include <numbers>
#include <numeric>

#include "tests/kernels/bounded.hpp"
#include "tests/kernels/heads.hpp"

namespace kernel_test {
namespace {

// `few` elements of each row of D are 1 or -1, the others 0; all of them where it is 0.
void set_signs(Case& c, Operand& x, std::int64_t dim, std::int64_t few) {
  for (std::int64_t i = 0; i < x.size(); ++i)
    x.set(i, few > 0 ? 0 : static_cast<double>(2 * c.integer(0, 1) - 1));
  for (std::int64_t row = 0; row < x.size(); row += dim)
    for (std::int64_t i = 0; i < few; ++i)
      x.set(row + c.integer(0, dim - 1), static_cast<double>(2 * c.integer(0, 1) - 1));
}

// Scores are whole multiples of scale, log 2, and so is lse: p is a power of 2 and ds that times a
// whole number of at most 8, which 16 bits hold, so that a wrong element shows at once. |q k| <= 4
// and lse / scale <= 3: the argument of exp is at most 5 and comes of at most 8 roundings, exp adds
// 16 for it: p is off by 56 u, a term by 59 u and its share of a sum of N by N u more, then scale.
void check_powers_of_two(Case& c, DType dtype, const Heads& s) {
  const std::int64_t d = s.dim, rows = s.batch * s.length, group = s.heads / s.kv_heads;
  Operand& q = c.input(dtype, rows * s.heads * d);
  Operand& kv = c.input(dtype, rows * 2 * s.kv_heads * d);  // side by side
  Operand &o = c.input(dtype, q.size()), &d_o = c.input(dtype, q.size());
  Operand& lse = c.input(computed_in(dtype), s.batch * s.heads * s.length);
  Operand &dq = c.output(dtype, q.size()), &d_kv = c.output(dtype, kv.size());
  set_signs(c, q, d, 4);
  set_signs(c, d_o, d, 4);
  set_signs(c, kv, d, 0);
  set_signs(c, o, d, 0);
  const auto scale = std::numbers::ln2_v<float>;
  std::vector<double> powers;
  for (std::int64_t i = 0; i < lse.size(); ++i) {
    powers.push_back(static_cast<double>(c.integer(0, 3)));
    lse.set(i, powers.back() * static_cast<double>(scale));
  }
  const Workspace workspace(c.target(), c.target().driver
                                            ? attention_workspace_bytes(s.batch, s.length, s.heads,
                                                                        s.kv_heads, d, dtype, true)
                                            : 0);
  c.compute([&](const Kernels& kernels, Side side, Exec& exec) {
    const auto v_of = [&](Operand& x) {
      return x.at<std::byte>(side) + s.kv_heads * d * static_cast<std::int64_t>(size_bytes(dtype));
    };
    const std::uint16_t kv_row = as_u16(2 * s.kv_heads);
    kernels.attention_backward({.dq = dq.at(side),
                                .dk = d_kv.at(side),
                                .dv = v_of(d_kv),
                                .q = q.at(side),
                                .k = kv.at(side),
                                .v = v_of(kv),
                                .o = o.at(side),
                                .d_o = d_o.at(side),
                                .lse = lse.at(side),
                                .workspace = workspace.at(side),
                                .scale = scale,
                                .batch = static_cast<std::int32_t>(s.batch),
                                .length = static_cast<std::int32_t>(s.length),
                                .heads = as_u16(s.heads),
                                .kv_heads = as_u16(s.kv_heads),
                                .head_dim = as_u16(d),
                                .q_row = as_u16(s.heads),
                                .k_row = kv_row,
                                .v_row = kv_row,
                                .dq_row = as_u16(s.heads),
                                .dk_row = kv_row,
                                .dv_row = kv_row,
                                .dtype = dtype,
                                .causal = s.causal,
                                .deterministic = true},
                               exec);
  });
  const HeadView of_q{s.heads, 0, s.length, d}, of_k{2 * s.kv_heads, 0, s.length, d},
      of_v{2 * s.kv_heads, s.kv_heads, s.length, d};
  const std::vector<double> qs = contents(q), kvs = contents(kv), os = contents(o),
                            ds = contents(d_o);
  const auto product = [d](const double* x, const double* y) {
    return std::inner_product(x, x + d, y, 0.0);
  };
  std::vector<double> by_q(qs.size()), by_kv(kvs.size()), q_size(qs.size()), kv_size(kvs.size());
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.heads; ++h)
      for (std::int64_t t = 0; t < s.length; ++t) {
        const double *query = of_q(qs, b, t, h), *grad = of_q(ds, b, t, h);
        const double delta = product(grad, of_q(os, b, t, h));
        const double n = powers[static_cast<std::size_t>((b * s.heads + h) * s.length + t)];
        for (std::int64_t j = 0; j < (s.causal ? t + 1 : s.length); ++j) {
          const std::int64_t at_q = of_q.at(b, t, h), at_k = of_k.at(b, j, h / group),
                             at_v = of_v.at(b, j, h / group);
          const double *key = &kvs[static_cast<std::size_t>(at_k)],
                       *value = &kvs[static_cast<std::size_t>(at_v)];
          const double weight = std::exp2(product(query, key) - n),
                       d_score =
                           static_cast<double>(scale) * weight * (product(grad, value) - delta);
          const auto add = [](std::vector<double>& sums, std::vector<double>& sizes,
                              std::int64_t at, double x) {
            sums[static_cast<std::size_t>(at)] += x;
            sizes[static_cast<std::size_t>(at)] += std::abs(x);
          };
          for (std::int64_t i = 0; i < d; ++i) {
            add(by_q, q_size, at_q + i, d_score * key[i]);
            add(by_kv, kv_size, at_k + i, d_score * query[i]);
            add(by_kv, kv_size, at_v + i, weight * grad[i]);
          }
        }
      }
  const auto compare = [&](const Operand& x, const std::vector<double>& expected,
                           const std::vector<double>& sizes, std::int64_t heads) {
    const double w = dtype == f32 ? 0 : epsilon(dtype);
    const double share = static_cast<double>(heads * s.length + 61) * epsilon(f32);
    for (std::int64_t i = 0; i < x.size(); ++i) {
      const double value = expected[static_cast<std::size_t>(i)];
      const double bound = sizes[static_cast<std::size_t>(i)] * share;
      c.near(x, i, value, bound + w * (std::abs(value) + bound));
    }
  };
  compare(dq, by_q, q_size, 1);
  compare(d_kv, by_kv, kv_size, group);
  c.next();
}

}  // namespace

TESSERA_CASE("attention_backward", "powers of two are off by their last rounding only") {
  for (const DType dtype : {bf16, f16}) {
    for (const std::int64_t length : {1, 63, 64, 65, 127, 128, 129, 200})
      check_powers_of_two(c, dtype, {1, length, 1, 1, 64});
    for (const std::int64_t dim : {8, 16, 40, 96, 128})
      check_powers_of_two(c, dtype, {1, 130, 1, 1, dim});
    check_powers_of_two(c, dtype, {2, 140, 4, 2, 24});
    check_powers_of_two(c, dtype, {1, 70, 3, 1, 128, false});
    check_powers_of_two(c, dtype, {2, 131, 2, 2, 64, false});
  }
  check_powers_of_two(c, f32, {2, 67, 4, 2, 24});
}

}  // namespace kernel_test
