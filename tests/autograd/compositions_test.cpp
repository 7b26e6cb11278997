// What include/tessera/tensor/README.md writes in a line or two where PyTorch has an operation and
// we have none: each such line, against loops on the host.
#include <cmath>

#include "tests/autograd/helpers.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Both sides take at most some forty operations of f64, on values below 10 and without cancelling:
// each adds 2^-53, a function of the library four times that.
bool is_near(double value, double expected) {
  return std::abs(value - expected) <= 40 * 10 * 4 * 0x1p-53 * (1 + std::abs(expected));
}

void check(const Tensor& got, const Shape& shape,
           const std::function<double(const std::vector<std::int64_t>&)>& expected) {
  REQUIRE(got.shape() == shape);
  const std::vector<double> values = raw::contiguous(got.detach()).to_vector<double>();
  std::vector<std::int64_t> at(static_cast<std::size_t>(shape.ndim()), 0);
  for (const double value : values) {
    CHECK(is_near(value, expected(at)));
    for (int d = shape.ndim() - 1; d >= 0; --d) {
      if (++at[static_cast<std::size_t>(d)] < shape[d]) break;
      at[static_cast<std::size_t>(d)] = 0;
    }
  }
}

double sigma(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

TEST_CASE("elementwise operations that the table composes") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.away_from_zero({4, 5}), y = draw.away_from_zero({4, 5}),
               p = draw.uniform({4, 5}, 0.1, 1.4);
  const std::vector<double> a = x.to_vector<double>(), b = y.to_vector<double>(),
                            c = p.to_vector<double>();
  const auto each = [&](const Tensor& got, const std::function<double(std::size_t)>& f) {
    check(got, {4, 5}, [&](const std::vector<std::int64_t>& at) {
      return f(static_cast<std::size_t>(5 * at[0] + at[1]));
    });
  };
  const auto trunc = [](const Tensor& t) { return sign(t) * floor(abs(t)); };
  each(-floor(-x), [&](std::size_t i) { return std::ceil(a[i]); });
  each(trunc(x), [&](std::size_t i) { return std::trunc(a[i]); });
  each(x - y * trunc(x / y), [&](std::size_t i) { return std::fmod(a[i], b[i]); });
  each(x - y * floor(x / y), [&](std::size_t i) { return a[i] - b[i] * std::floor(a[i] / b[i]); });
  each(sin(p) / cos(p), [&](std::size_t i) { return std::tan(c[i]); });
  each(log(p) * (1 / std::log(2.0)), [&](std::size_t i) { return std::log2(c[i]); });
  each((exp(x) - exp(-x)) * 0.5, [&](std::size_t i) { return std::sinh(a[i]); });
  each(pow(2.0, x), [&](std::size_t i) { return std::exp2(a[i]); });
  each(softplus(x * 3) / 3, [&](std::size_t i) { return std::log1p(std::exp(3 * a[i])) / 3; });
  each(minimum(maximum(x, -p), p),
       [&](std::size_t i) { return std::min(std::max(a[i], -c[i]), c[i]); });
  check(exp(cumsum(log(p), 1)), {4, 5}, [&](const std::vector<std::int64_t>& at) {
    double product = 1;
    for (std::int64_t j = 0; j <= at[1]; ++j) product *= c[static_cast<std::size_t>(5 * at[0] + j)];
    return product;
  });
}

TEST_CASE("a cross-entropy with probabilities, as the table composes it") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.normal({3, 4}), p = softmax(draw.normal({3, 4}));
  const std::vector<double> a = x.to_vector<double>(), b = p.to_vector<double>();
  double expected = 0;
  for (std::size_t row = 0; row < 12; row += 4) {
    double sum = 0;
    for (std::size_t j = 0; j < 4; ++j) sum += std::exp(a[row + j]);
    for (std::size_t j = 0; j < 4; ++j) expected -= b[row + j] * (a[row + j] - std::log(sum)) / 3;
  }
  CHECK(is_near((-mean(sum(p * log_softmax(x, 1), 1))).item(), expected));
}

TEST_CASE("windows, grids, pools and counts that the table composes") {
  Draw draw;
  INFO("seed " << draw.seed);
  const Tensor x = draw.normal({2, 3, 6, 8});
  const std::vector<double> v = x.to_vector<double>();
  const auto at = [&](std::int64_t b, std::int64_t c, std::int64_t h, std::int64_t w) {
    return v[static_cast<std::size_t>(((b * 3 + c) * 6 + h) * 8 + w)];
  };
  // x.unfold(3, 4, 2)
  const Device& device = draw.device;
  const Tensor places = unsqueeze(arange(0, 5, 2, i64, device), 1) + arange(0, 4, 1, i64, device);
  check(index(x, {ellipsis, places}), {2, 3, 6, 3, 4},
        [&](const std::vector<std::int64_t>& i) { return at(i[0], i[1], i[2], 2 * i[3] + i[4]); });
  // max_pool2d(x, 2)
  check(amax(reshape(x, {2, 3, 3, 2, 4, 2}), {3, 5}), {2, 3, 3, 4},
        [&](const std::vector<std::int64_t>& i) {
          double most = -INFINITY;
          for (int k = 0; k < 4; ++k)
            most = std::max(most, at(i[0], i[1], 2 * i[2] + k / 2, 2 * i[3] + k % 2));
          return most;
        });
  // meshgrid(a, b, indexing='ij')
  const Tensor a = draw.normal({3}), b = draw.normal({4});
  check(expand(unsqueeze(a, 1), {3, 4}), {3, 4},
        [&, r = a.to_vector<double>()](const std::vector<std::int64_t>& i) {
          return r[static_cast<std::size_t>(i[0])];
        });
  // bincount, histc
  const Tensor ids = Tensor::from(std::vector<std::int64_t>{2, 0, 2, 2, 1}, {5}, device);
  const Tensor counts =
      index_add(Tensor::zeros({4}, f64, device), 0, ids, Tensor::ones({5}, f64, device));
  CHECK(counts.to_vector<double>() == std::vector<double>{1, 1, 3, 0});
  // kthvalue, median
  CHECK(select(sort(Tensor::from(std::vector<double>{3, 1, 2}, {3}, device), 0).values, 0, 1)
            .item() == 2);
  // ALiBi's bias of two heads
  const Tensor slopes = Tensor::from(std::vector<double>{0.5, 0.25}, {2, 1, 1}, device),
               t = arange(0, 3, 1, f64, device);
  check(slopes * (t - unsqueeze(t, 1)), {2, 3, 3}, [](const std::vector<std::int64_t>& i) {
    return (i[0] == 0 ? 0.5 : 0.25) * static_cast<double>(i[2] - i[1]);
  });
}

TEST_CASE("normalizations and a recurrent cell that the table composes") {
  Draw draw;
  INFO("seed " << draw.seed);
  constexpr double kEps = 1e-5;
  const Tensor x = draw.normal({2, 4, 3});
  const std::vector<double> v = x.to_vector<double>();
  const auto normal_of = [&](double value, const std::vector<double>& among) {
    double mean = 0, square = 0;
    for (const double e : among) mean += e / static_cast<double>(among.size());
    for (const double e : among) square += (e - mean) * (e - mean);
    return (value - mean) / std::sqrt(square / static_cast<double>(among.size()) + kEps);
  };
  const auto value = [&](std::int64_t n, std::int64_t c, std::int64_t l) {
    return v[static_cast<std::size_t>((n * 4 + c) * 3 + l)];
  };
  // batch_norm in training: over all but the channels
  const Tensor centred = x - mean(x, {0, 2}, KeepDim::yes);
  check(centred * rsqrt(var(x, {0, 2}, 0, KeepDim::yes) + kEps), {2, 4, 3},
        [&](const std::vector<std::int64_t>& i) {
          std::vector<double> among;
          for (int n = 0; n < 2; ++n)
            for (int l = 0; l < 3; ++l) among.push_back(value(n, i[1], l));
          return normal_of(value(i[0], i[1], i[2]), among);
        });
  // group_norm(x, 2): the groups of each sample
  const Tensor groups = reshape(x, {4, -1});
  const Tensor ones = Tensor::ones({6}, f64, draw.device),
               zeros = Tensor::zeros({6}, f64, draw.device);
  check(reshape(layer_norm(groups, ones, zeros, kEps), x.shape()), {2, 4, 3},
        [&](const std::vector<std::int64_t>& i) {
          std::vector<double> among;
          for (int k = 0; k < 6; ++k) among.push_back(value(i[0], i[1] / 2 * 2 + k / 3, k % 3));
          return normal_of(value(i[0], i[1], i[2]), among);
        });
  // one step of an LSTM of 2 cells
  const Tensor in = draw.normal({1, 3}), h = draw.normal({1, 2}), c = draw.normal({1, 2});
  const Tensor w = draw.normal({8, 3}), u = draw.normal({8, 2});
  const std::vector<Tensor> g = chunk(linear(in, w) + linear(h, u), 4, 1);
  const Tensor cell = sigmoid(g[1]) * c + sigmoid(g[0]) * tanh(g[2]);
  const auto gate = [&, a = in.to_vector<double>(), b = h.to_vector<double>(),
                     p = w.to_vector<double>(), q = u.to_vector<double>()](std::int64_t row) {
    double sum = 0;
    for (int k = 0; k < 3; ++k) sum += a[std::size_t(k)] * p[static_cast<std::size_t>(3 * row + k)];
    for (int k = 0; k < 2; ++k) sum += b[std::size_t(k)] * q[static_cast<std::size_t>(2 * row + k)];
    return sum;
  };
  check(sigmoid(g[3]) * tanh(cell), {1, 2},
        [&, held = c.to_vector<double>()](const std::vector<std::int64_t>& i) {
          const std::int64_t j = i[1];
          const double next = sigma(gate(2 + j)) * held[static_cast<std::size_t>(j)] +
                              sigma(gate(j)) * std::tanh(gate(4 + j));
          return sigma(gate(6 + j)) * std::tanh(next);
        });
}
