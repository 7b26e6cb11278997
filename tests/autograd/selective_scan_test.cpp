// An operation of one's own with two results, five gradients and two dtypes: the selective scan of
// Mamba, against its closed form and slopes.
#include "tests/autograd/selective_scan.hpp"

#include <cmath>
#include <limits>

#include "tessera/autograd/recompute.hpp"
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Inputs of one scan: u, delta, A, B, C. Steps are positive, rates negative, as Mamba has them.
struct ScanInputs {
  Tensor u, delta, a, b, c;
  ScanInputs(Draw& draw, std::int64_t batch, std::int64_t T, std::int64_t D, std::int64_t N)
      : u(draw.normal({batch, T, D})),
        delta(draw.uniform({batch, T, D}, 0.1, 1)),
        a(draw.uniform({D, N}, -2, -0.1)),
        b(draw.normal({batch, T, N})),
        c(draw.normal({batch, T, N})) {}
  std::vector<Tensor> all() const { return {u, delta, a, b, c}; }
};

template <class X, class S>
ScanResults scan(const std::vector<Tensor>& v) {
  return selective_scan<X, S>(v[0], v[1], v[2], v[3], v[4]);
}

// y of sequence i, step t and channel d without a recurrence, and the sum of the sizes of its
// terms:  sum over n and s <= t of C[t] exp(A (delta[s+1] + ... + delta[t])) delta[s] B[s] u[s].
std::pair<double, double> closed_form(const std::vector<std::vector<double>>& v, const Shape& of_u,
                                      std::int64_t N, std::int64_t i, std::int64_t t,
                                      std::int64_t d) {
  const std::int64_t T = of_u[1], D = of_u[2];
  const auto at = [](const std::vector<double>& x, std::int64_t k) {
    return x[static_cast<std::size_t>(k)];
  };
  double sum = 0, sizes = 0;
  for (std::int64_t n = 0; n < N; ++n)
    for (std::int64_t s = 0; s <= t; ++s) {
      double steps = 0;
      for (std::int64_t r = s + 1; r <= t; ++r) steps += at(v[1], (i * T + r) * D + d);
      const double term = at(v[4], (i * T + t) * N + n) * std::exp(at(v[2], d * N + n) * steps) *
                          at(v[1], (i * T + s) * D + d) * at(v[3], (i * T + s) * N + n) *
                          at(v[0], (i * T + s) * D + d);
      sum += term;
      sizes += std::abs(term);
    }
  return {sum, sizes};
}

std::vector<double> doubles(const Tensor& x) { return raw::cast(x, f64).to_vector<double>(); }

}  // namespace

TEST_CASE("the selective scan is its closed form, in f32 and f64") {
  Draw draw;
  INFO("seed " << draw.seed);
  const std::int64_t batch = 2, T = 7, D = 3, N = 4;
  const ScanInputs given(draw, batch, T, D, N);
  std::vector<Tensor> narrow;
  std::vector<std::vector<double>> values;  // that f32 has exactly
  for (const Tensor& x : given.all()) {
    narrow.push_back(raw::cast(x, f32));
    values.push_back(doubles(narrow.back()));
  }
  std::vector<Tensor> wide;
  for (const Tensor& x : narrow) wide.push_back(raw::cast(x, f64));
  const auto [y_32, last_32] = scan<float, float>(narrow);
  const auto [y_64, last_64] = scan<double, double>(wide);
  for (const auto& [y, eps] : {std::pair(y_32, 0x1p-24), std::pair(y_64, 0x1p-53)}) {
    const std::vector<double> found = doubles(y);
    for (std::int64_t i = 0; i < batch; ++i)
      for (std::int64_t t = 0; t < T; ++t)
        for (std::int64_t d = 0; d < D; ++d) {
          const auto [sum, sizes] = closed_form(values, given.u.shape(), N, i, t, d);
          // A term has up to T decays, each of 3 roundings (its exponent of at most 2, the
          // function, the product), 4 other products, and T + N additions; the exponent's rounding
          // counts 2 times. The closed form in f64 has as many of its own.
          const double allowed = (eps + 0x1p-53) * sizes * double(4 * T + 4 + T + N);
          CHECK(std::abs(found[static_cast<std::size_t>((i * T + t) * D + d)] - sum) <= allowed);
        }
  }
}

TEST_CASE("the five gradients of the selective scan, by either result and by both") {
  Draw draw;
  INFO("seed " << draw.seed);
  for (const auto& [batch, T, D, N] : {std::array<std::int64_t, 4>{2, 5, 3, 2}, {1, 1, 2, 3}}) {
    const auto inputs = ScanInputs(draw, batch, T, D, N).all();
    const Tensor of_y = draw.normal({batch, T, D}), of_last = draw.normal({batch, D, N});
    check_gradients([](const auto& v) { return scan<double, double>(v).y; }, inputs);
    check_gradients([](const auto& v) { return scan<double, double>(v).last; }, inputs);
    const auto both = [&](const auto& v) {
      const auto [y, last] = scan<double, double>(v);
      return sum(y * of_y) + sum(last * of_last) + sum(mul(last, last));
    };
    check_gradients(both, inputs);
    check_gradients(
        [&](const auto& v) {
          return recompute(
              [&](std::span<const Tensor> in) {
                return both(std::vector<Tensor>(in.begin(), in.end()));
              },
              v);
        },
        inputs);
  }
}

TEST_CASE("activations in bf16 beside rates in f32 have the bits of f32, rounded once") {
  Draw draw;
  INFO("seed " << draw.seed);
  std::vector<Tensor> mixed, wide;
  for (const Tensor& x : ScanInputs(draw, 2, 5, 3, 4).all()) {
    const bool is_rate = mixed.size() == 2;
    mixed.push_back(raw::cast(x, is_rate ? f32 : bf16).require_grad());
    wide.push_back(raw::cast(mixed.back(), f32).require_grad());
  }
  const Tensor gradient = raw::cast(draw.normal({2, 5, 3}), bf16);
  const auto [y, last] = scan<BFloat16, float>(mixed);
  const auto [wide_y, wide_last] = scan<float, float>(wide);
  y.backward(gradient);
  wide_y.backward(raw::cast(gradient, f32));
  CHECK(y.dtype() == bf16);
  CHECK(bytes_of(y) == bytes_of(raw::cast(wide_y, bf16)));
  CHECK(bytes_of(last) == bytes_of(wide_last));
  for (std::size_t i = 0; i < mixed.size(); ++i) {
    INFO("input " << i);
    CHECK(bytes_of(mixed[i].grad()) == bytes_of(raw::cast(wide[i].grad(), mixed[i].dtype())));
  }
}
