// Initial values have the right distribution; that they follow their formula is a case of every
// device's.
#include "tests/kernels/support.hpp"

using namespace kernel_test;

TEST_CASE("normal values have the moments of a normal distribution", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  const std::int64_t n = 200000;
  Array x(DType::f32, n);
  Exec exec;
  cpu_kernels().normal({.out = x.data(),
                        .key = random.engine(),
                        .begin = 0,
                        .count = n,
                        .mean = 1,
                        .std = 0.5,
                        .dtype = DType::f32},
                       exec);
  double mean = 0, square = 0, fourth = 0, beyond = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double z = (x[i] - 1) / 0.5;
    mean += z / n;
    square += z * z / n;
    fourth += z * z * z * z / n;
    beyond += std::abs(z) > 1.96 ? 1.0 / n : 0;
  }
  // Six standard deviations of each estimate: variances 1, 2, 96 and p (1 - p) over n.
  const double root = std::sqrt(static_cast<double>(n));
  REQUIRE(std::abs(mean) < 6 / root);
  REQUIRE(std::abs(square - 1) < 6 * std::sqrt(2.0) / root);
  REQUIRE(std::abs(fourth - 3) < 6 * std::sqrt(96.0) / root);
  REQUIRE(std::abs(beyond - 0.05) < 6 * std::sqrt(0.05 * 0.95) / root);
}
