// AdamW, SGD and clipping over segments against double precision, and the sums of collectives.
#include "tests/kernels/support.hpp"

using namespace kernel_test;

namespace {

// Three segments with gaps; the second has no gradient.
const std::vector<FlatSegment> kSegments = {
    {3, 20000, 0, 0.1f}, {20001, 20100, 1, 0.0f}, {20128, 40003, 2, 0.5f}};
const std::vector<float> kCounts = {1, 0, 2};
constexpr std::int64_t kSize = 40010;

float* floats(Array& a) { return static_cast<float*>(a.data()); }
const float* floats(const Array& a) { return static_cast<const float*>(a.data()); }

// Calls f(i, weight_decay) for each element that an optimizer must update.
template <class F>
void for_updated(bool with_counts, F f) {
  for (const FlatSegment& s : kSegments)
    if (!with_counts || kCounts[static_cast<std::size_t>(s.count_index)] != 0)
      for (std::int64_t i = s.begin; i < s.end; ++i) f(i, static_cast<double>(s.weight_decay));
}

std::vector<double> values(const Array& a) {
  std::vector<double> out;
  for (std::int64_t i = 0; i < a.size(); ++i) out.push_back(a[i]);
  return out;
}

}  // namespace

TEST_CASE("AdamW updates segments that have a gradient and nothing else", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  const float clip = 0.7f;
  const UpdateScalars s{.lr = 0.01f,
                        .beta1 = 0.9f,
                        .beta2 = 0.95f,
                        .eps = 1e-8f,
                        .bias_correction1 = 0.271f,
                        .bias_correction2 = 0.142625f,
                        .grad_scale = 0.5f,
                        .momentum = 0};
  for (const bool with_counts : {true, false}) {
    for (const bool clipped : {true, false}) {
      Array p = random.array(DType::f32, kSize), m = random.array(DType::f32, kSize),
            v = random.array(DType::f32, kSize, 0, 1);
      const Array g = random.array(DType::f32, kSize);
      auto ep = values(p), em = values(m), ev = values(v);
      for_updated(with_counts, [&](std::int64_t index, double decay) {
        const auto i = static_cast<std::size_t>(index);
        const double d = g[index] * 0.5 * (clipped ? static_cast<double>(clip) : 1);
        em[i] = static_cast<double>(s.beta1) * em[i] + (1 - static_cast<double>(s.beta1)) * d;
        ev[i] = static_cast<double>(s.beta2) * ev[i] + (1 - static_cast<double>(s.beta2)) * d * d;
        ep[i] -= static_cast<double>(s.lr) * decay * ep[i];
        ep[i] -= static_cast<double>(s.lr) / static_cast<double>(s.bias_correction1) * em[i] /
                 (std::sqrt(ev[i]) / std::sqrt(static_cast<double>(s.bias_correction2)) +
                  static_cast<double>(s.eps));
      });
      const UpdateArgs args{.values = floats(p),
                            .moments = {floats(m), floats(v)},
                            .gradient = floats(g),
                            .segments = kSegments.data(),
                            .counts = with_counts ? kCounts.data() : nullptr,
                            .scalars = &s,
                            .clip = clipped ? &clip : nullptr,
                            .segment_count = 3,
                            .op = UpdateOp::adamw};
      on_threads([&](Exec& exec) { cpu_kernels().update(args, exec); }, p, m, v);
      // Moments are sums of two products below 2: off by 8 roundings of 1.
      require_close(m, em, 0x1p-24, 4 * 2 * 0x1p-24);
      require_close(v, ev, 0x1p-24, 4 * 0x1p-24);
      // The step rate m / den inherits the error of m over den, and some 8 roundings of itself (v
      // has no cancellation); the parameter, below 2, rounds twice.
      const double rate = static_cast<double>(s.lr / s.bias_correction1),
                   root = std::sqrt(static_cast<double>(s.bias_correction2));
      for (std::int64_t i = 0; i < kSize; ++i) {
        const double after = ep[static_cast<std::size_t>(i)];
        const double den =
            std::sqrt(ev[static_cast<std::size_t>(i)]) / root + static_cast<double>(s.eps);
        const double step = rate * std::abs(em[static_cast<std::size_t>(i)]) / den;
        const double bound = 0x1p-24 * (4 + 10 * step + rate * 8 / den);
        if (std::abs(p[i] - after) > bound)
          FAIL("element " << i << ": " << p[i] << " instead of " << after);
      }
    }
  }
}

TEST_CASE("SGD with and without momentum", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  const UpdateScalars s{.lr = 0.1f,
                        .beta1 = 0,
                        .beta2 = 0,
                        .eps = 0,
                        .bias_correction1 = 1,
                        .bias_correction2 = 1,
                        .grad_scale = 2,
                        .momentum = 0.9f};
  for (const bool with_momentum : {true, false}) {
    Array p = random.array(DType::f32, kSize), buffer = random.array(DType::f32, kSize);
    const Array g = random.array(DType::f32, kSize);
    auto ep = values(p), eb = values(buffer);
    for_updated(true, [&](std::int64_t index, double decay) {
      const auto i = static_cast<std::size_t>(index);
      double d = 2 * g[index] + decay * ep[i];
      if (with_momentum) d = eb[i] = static_cast<double>(s.momentum) * eb[i] + d;
      ep[i] -= static_cast<double>(s.lr) * d;
    });
    const UpdateArgs args{.values = floats(p),
                          .moments = {with_momentum ? floats(buffer) : nullptr},
                          .gradient = floats(g),
                          .segments = kSegments.data(),
                          .counts = kCounts.data(),
                          .scalars = &s,
                          .clip = nullptr,
                          .segment_count = 3,
                          .op = UpdateOp::sgd};
    on_threads([&](Exec& exec) { cpu_kernels().update(args, exec); }, p, buffer);
    // Four products and sums of values of at most 7.
    require_close(p, ep, 0x1p-24, 4 * 7 * 0x1p-24);
    require_close(buffer, eb, 0x1p-24, 4 * 7 * 0x1p-24);
  }
}

TEST_CASE("clipping scales large norms down and leaves small ones alone", "[kernels]") {
  for (const double norm : {0.0, 0.5, 1.0, 40.0}) {
    const double sum = norm * norm;
    float coefficient = -1, measured = -1;
    Exec exec;
    cpu_kernels().clip({.coefficient = &coefficient,
                        .norm = &measured,
                        .sumsq = &sum,
                        .max_norm = 1,
                        .dtype = DType::f64},
                       exec);
    REQUIRE(measured == Approx(norm));
    REQUIRE(coefficient == Approx(std::min(1.0, 1 / (norm + 1e-6))));
    kernel_test::Random random;
    Array data = random.array(DType::f32, 33333);
    auto expected = values(data);
    for (double& x : expected) x *= static_cast<double>(coefficient);
    on_threads(
        [&](Exec& e) {
          cpu_kernels().scale_flat({.data = floats(data), .factor = &coefficient, .count = 33333},
                                   e);
        },
        data);
    require_close(data, expected, 0x1p-24);
  }
  const float bad = NAN;
  float coefficient = 0;
  Exec exec;
  cpu_kernels().clip({.coefficient = &coefficient,
                      .norm = nullptr,
                      .sumsq = &bad,
                      .max_norm = 1,
                      .dtype = DType::f32},
                     exec);
  REQUIRE(std::isnan(coefficient));
}

TEST_CASE("peers' buffers are added in order, in place too", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kAll) {
    for (const int peers : {0, 1, 2, 5}) {
      for (const std::int64_t n : {0, 1, 31, 32, 33, 1030}) {
        INFO(dtype << ", " << peers << " peers of " << n);
        std::vector<Array> inputs;
        std::vector<const void*> pointers;
        for (int p = 0; p < peers; ++p) inputs.push_back(random.array(dtype, n));
        for (const Array& a : inputs) pointers.push_back(a.data());
        Array expected(dtype, n), out = random.array(dtype, n);
        for (std::int64_t i = 0; i < n; ++i) {
          double sum = 0;
          for (const Array& a : inputs) {
            if (dtype == DType::boolean)
              sum = sum != 0 || a[i] != 0;
            else
              sum = dtype == DType::f64 || !is_floating(dtype) ? sum + a[i]
                                                               : double(float(sum) + float(a[i]));
          }
          expected.set(i, sum);
        }
        const auto sum_to = [&](void* to) {
          Exec exec;
          cpu_kernels().reduce_peers({to, pointers.data(), n, peers, dtype, PeersOp::sum}, exec);
        };
        sum_to(out.data());
        REQUIRE(out.bytes == expected.bytes);
        if (peers == 0) continue;
        sum_to(inputs[0].data());
        REQUIRE(inputs[0].bytes == expected.bytes);
        Array copy(dtype, n);
        Exec exec;
        cpu_kernels().copy({copy.data(), out.data(), static_cast<std::int64_t>(out.bytes.size())},
                           exec);
        REQUIRE(copy.bytes == out.bytes);
      }
    }
  }
}
