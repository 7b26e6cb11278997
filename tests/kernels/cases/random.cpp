// Initial values and dropout: functions of (key, index) alone.
#include <cmath>
#include <numbers>

#include "tessera/base/philox.hpp"
#include "tests/kernels/bounded.hpp"

using namespace kernel_test;

namespace {

// Of the standard normal distribution, by the contract.
double normal_at(std::uint64_t key, std::int64_t e) {
  const auto w = philox(key, static_cast<std::uint64_t>(e / 2));
  const double u = (w[0] * 0x1p32 + w[1] + 0.5) * 0x1p-64,
               angle = 2 * std::numbers::pi * (w[2] * 0x1p32 + w[3]) * 0x1p-64;
  return std::sqrt(-2 * std::log(u)) * (e % 2 == 0 ? std::cos(angle) : std::sin(angle));
}
float uniform_at(std::uint64_t key, std::int64_t e) {
  return unit_float(
      philox(key, static_cast<std::uint64_t>(e / 4))[static_cast<std::size_t>(e % 4)]);
}

}  // namespace

TESSERA_CASE("random", "any range of the whole parameter, by the contract's formula") {
  for (const DType dtype : kFloats)
    for (const std::int64_t n : {1, 5, 1031, 20011}) {
      const auto key = static_cast<std::uint64_t>(c.integer(0, INT64_MAX));
      const std::int64_t begin = c.integer(0, 1LL << 36);
      const auto shift = static_cast<std::int64_t>(size_bytes(dtype));
      Operand &normal = c.output(dtype, n), &uniform = c.output(dtype, n, shift);
      c.compute([&](const Kernels& k, Side side, Exec& exec) {
        k.normal({.out = normal.at(side),
                  .key = key,
                  .begin = begin,
                  .count = n,
                  .mean = 0.25,
                  .std = 0.5,
                  .dtype = dtype},
                 exec);
        k.uniform({.out = uniform.at(side),
                   .key = key,
                   .begin = begin,
                   .count = n,
                   .low = -1,
                   .high = 3,
                   .dtype = dtype},
                  exec);
      });
      // In f64 log is within 1 unit, cos and sin within 2 (CUDA programming guide), the host's and
      // this test's within 1; |std sqrt(-2 ln u)| <= 0.5 * 9.5, of ten roundings a side. Then one
      // rounding to the dtype, at the coarsest of f16's smallest numbers.
      const double absolute = 2 * 0.5 * 9.5 * 16 * epsilon(f64) + (dtype == f16 ? 0x1p-25 : 0);
      for (std::int64_t i = 0; i < n; ++i) {
        const double expected = 0.25 + 0.5 * normal_at(key, begin + i);
        c.near(normal, i, expected, epsilon(dtype) * std::abs(expected) + absolute);
        // -1 + 4 u is exact in f64.
        const double exact = -1 + 4 * static_cast<double>(uniform_at(key, begin + i));
        c.near(uniform, i, rounded_to(dtype, exact), 0);
      }
      c.next();
    }
}

TESSERA_CASE("random", "values do not depend on how the range is cut") {
  for (const DType dtype : kFloats) {
    const std::int64_t n = 5003, size = static_cast<std::int64_t>(size_bytes(dtype));
    const auto key = static_cast<std::uint64_t>(c.integer(0, INT64_MAX));
    std::vector<std::int64_t> cuts{0};
    while (cuts.back() < n) cuts.push_back(std::min(n, cuts.back() + c.integer(0, 700)));
    Operand *whole[2], *pieces[2];
    for (int kind = 0; kind < 2; ++kind) {
      whole[kind] = &c.output(dtype, n);
      pieces[kind] = &c.output(dtype, n);
    }
    c.compute([&](const Kernels& k, Side side, Exec& exec) {
      const auto fill = [&](Operand* const* out, std::int64_t begin, std::int64_t count) {
        k.normal({.out = out[0]->at<std::byte>(side) + begin * size,
                  .key = key,
                  .begin = begin,
                  .count = count,
                  .mean = 0.5,
                  .std = 2,
                  .dtype = dtype},
                 exec);
        k.uniform({.out = out[1]->at<std::byte>(side) + begin * size,
                   .key = key,
                   .begin = begin,
                   .count = count,
                   .low = -1,
                   .high = 3,
                   .dtype = dtype},
                  exec);
      };
      fill(whole, 0, n);
      for (std::size_t i = 1; i < cuts.size(); ++i)
        fill(pieces, cuts[i - 1], cuts[i] - cuts[i - 1]);
    });
    for (int kind = 0; kind < 2; ++kind)
      for (std::int64_t i = 0; i < n; ++i)
        c.near(*pieces[kind], i, c.on_device(*whole[kind], i), 0);
    c.next();
  }
}

TESSERA_CASE("dropout", "keeps by the counter, scales what it keeps; in place, misaligned") {
  for (const DType dtype : kFloats)
    for (const std::int64_t n :
         {std::int64_t{1}, std::int64_t{7}, c.integer(2048, 2070), std::int64_t{20011}})
      for (const float p : {0.0f, static_cast<float>(c.uniform(0.05, 0.95)), 0.75f, 1.0f}) {
        const std::int64_t shift = n % 2 == 0 ? static_cast<std::int64_t>(size_bytes(dtype)) : 0;
        const auto key = static_cast<std::uint64_t>(c.integer(0, 1LL << 62));
        const std::int64_t from = c.integer(0, 1LL << 40);
        Operand &x = c.input(dtype, n, -2, 2, shift), &y = c.output(dtype, n, shift),
                &z = c.updated(dtype, n), &other_key = c.input(i64, 1, 0, 1e9);
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          DropoutArgs args{.y = y.at(side),
                           .x = x.at(side),
                           .device_key = other_key.at<std::uint64_t>(side),
                           .key = key,
                           .offset = from,
                           .count = n,
                           .p = p,
                           .dtype = dtype};
          k.dropout(args, exec);
          args.y = z.at(side);
          args.x = z.at(side);
          args.device_key = nullptr;
          k.dropout(args, exec);
        });
        // 1 - p, its reciprocal or a quotient, a product; then one rounding to the dtype.
        const double relative = epsilon(dtype) + 4 * epsilon(dtype == f64 ? f64 : f32),
                     tiny = dtype == f16 ? 0x1p-25 : 0;
        double kept = 0;
        const auto check = [&](const Operand& in, const Operand& out, std::uint64_t drawn) {
          for (std::int64_t e = 0; e < n; ++e) {
            const bool keeps = uniform_at(drawn, e + 4 * from) >= p;
            const double expected = keeps ? in.get(e) / (1 - static_cast<double>(p)) : 0;
            c.near(out, e, expected, keeps ? relative * std::abs(expected) + tiny : 0);
            kept += keeps;
          }
        };
        check(x, y, static_cast<std::uint64_t>(other_key.get(0)));
        const double share = kept / static_cast<double>(n), q = static_cast<double>(p);
        check(z, z, key);
        // Seven standard deviations: one of 10^11 seeds would miss it.
        if (n > 20000 &&
            std::abs(share - (1 - q)) > 7 * std::sqrt(q * (1 - q) / static_cast<double>(n)))
          c.fail(concat("keeps ", share, " of the elements where p is ", q));
        c.next();
      }
}
