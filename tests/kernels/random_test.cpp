// Initial values and dropout: functions of (key, index) only, with the right distributions.
#include "tessera/base/philox.hpp"
#include "tests/kernels/support.hpp"

using namespace kernel_test;

namespace {

template <class Fill>
void same_in_pieces(kernel_test::Random& random, DType dtype, Fill fill) {
  const std::int64_t n = 5003;
  Array whole(dtype, n), pieces(dtype, n);
  on_threads([&](Exec& exec) { fill(whole.data(), 0, n, exec); }, whole);
  Exec exec;
  for (std::int64_t begin = 0; begin < n;) {
    const std::int64_t count = std::min(n - begin, random.integer(0, 700));
    fill(pieces.bytes.data() + static_cast<std::size_t>(begin) * size_bytes(dtype), begin, count,
         exec);
    begin += count;
  }
  REQUIRE(whole.bytes == pieces.bytes);
}

}  // namespace

TEST_CASE("initial values do not depend on how the range is cut", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  const auto key = random.engine();
  for (const DType dtype : kFloats) {
    INFO(dtype);
    same_in_pieces(random, dtype,
                   [&](void* out, std::int64_t begin, std::int64_t count, Exec& exec) {
                     cpu_kernels().normal({.out = out,
                                           .key = key,
                                           .begin = begin,
                                           .count = count,
                                           .mean = 0.5,
                                           .std = 2,
                                           .dtype = dtype},
                                          exec);
                   });
    same_in_pieces(random, dtype,
                   [&](void* out, std::int64_t begin, std::int64_t count, Exec& exec) {
                     cpu_kernels().uniform({.out = out,
                                            .key = key,
                                            .begin = begin,
                                            .count = count,
                                            .low = -1,
                                            .high = 3,
                                            .dtype = dtype},
                                           exec);
                   });
  }
}

TEST_CASE("initial values follow the formula of the contract", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  const auto key = random.engine();
  const std::int64_t begin = 1001, count = 333;
  Array normal(DType::f64, count), uniform(DType::f64, count);
  Exec exec;
  cpu_kernels().normal({.out = normal.data(),
                        .key = key,
                        .begin = begin,
                        .count = count,
                        .mean = 0,
                        .std = 1,
                        .dtype = DType::f64},
                       exec);
  cpu_kernels().uniform({.out = uniform.data(),
                         .key = key,
                         .begin = begin,
                         .count = count,
                         .low = 2,
                         .high = 6,
                         .dtype = DType::f64},
                        exec);
  std::vector<double> expected_normal, expected_uniform;
  for (std::int64_t e = begin; e < begin + count; ++e) {
    const auto w = philox(key, static_cast<std::uint64_t>(e / 2));
    const double u = (w[0] * 0x1p32 + w[1] + 0.5) * 0x1p-64,
                 angle = 2 * M_PI * (w[2] * 0x1p32 + w[3]) * 0x1p-64;
    expected_normal.push_back(std::sqrt(-2 * std::log(u)) *
                              (e % 2 == 0 ? std::cos(angle) : std::sin(angle)));
    expected_uniform.push_back(
        2 + 4 * static_cast<double>(unit_float(philox(
                    key, static_cast<std::uint64_t>(e / 4))[static_cast<std::size_t>(e % 4)])));
  }
  // A few roundings of an angle of at most 2 pi and a radius of at most 10.
  require_close(normal, expected_normal, 0, 64 * 0x1p-53 * 10);
  require_close(uniform, expected_uniform, 4 * 0x1p-53);
}

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

TEST_CASE("dropout keeps by the counter, scales what it keeps, and is its own derivative",
          "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats) {
    for (const float p : {0.0f, 0.1f, 0.75f, 1.0f}) {
      INFO(dtype << ", p " << p);
      const std::int64_t n = 20011, device_offset = random.integer(0, 1000),
                         host_offset = random.integer(0, 1000);
      const auto key = random.engine();
      const Array x = random.array(dtype, n, 0.5, 2);
      Array y(dtype, n), in_place = x;
      on_threads(
          [&](Exec& exec) {
            DropoutArgs args{.y = y.data(),
                             .x = x.data(),
                             .device_offset = &device_offset,
                             .key = key,
                             .host_offset = host_offset,
                             .count = n,
                             .p = p,
                             .dtype = dtype};
            cpu_kernels().dropout(args, exec);
            args.y = in_place.data();
            args.x = in_place.data();
            args.device_offset = nullptr;
            args.host_offset += device_offset;
            cpu_kernels().dropout(args, exec);
          },
          y, in_place);
      REQUIRE(y.bytes == in_place.bytes);
      std::vector<double> expected;
      double kept = 0;
      for (std::int64_t e = 0; e < n; ++e) {
        const auto w =
            philox(key, static_cast<std::uint64_t>(e / 4 + device_offset +
                                                   host_offset))[static_cast<std::size_t>(e % 4)];
        const bool keep = unit_float(w) >= p;
        kept += keep;
        expected.push_back(keep ? x[e] / (1 - static_cast<double>(p)) : 0);
      }
      require_close(y, expected, epsilon(dtype) + 4 * compute_epsilon(dtype));
      REQUIRE(std::abs(kept / n - (1 - p)) <=
              6 * std::sqrt(p * (1 - p) / n) + 1e-12);  // six standard deviations
    }
  }
}
