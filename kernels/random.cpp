#include "kernels/random.hpp"

#include <cmath>
#include <numbers>

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/simd.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

constexpr std::int64_t kDrawGrain =
    kGrain / 16;  // a draw costs as much as some sixteen cheap elements

double unit(std::uint32_t high, std::uint32_t low) {
  return static_cast<double>(std::uint64_t{high} << 32 | low);
}

}  // namespace

void normal(const NormalArgs& a, Exec& exec) {
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* out = static_cast<T*>(a.out);
    for_ranges(exec, a.count, kDrawGrain, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t first = a.begin + begin, last = a.begin + end;
      for (std::int64_t pair = first / 2; 2 * pair < last; ++pair) {
        const auto w = philox(a.key, static_cast<std::uint64_t>(pair));
        const double radius = a.std * std::sqrt(-2 * std::log((unit(w[0], w[1]) + 0.5) * 0x1p-64));
        const double angle = 2 * std::numbers::pi * (unit(w[2], w[3]) * 0x1p-64);
        if (2 * pair >= first)
          out[2 * pair - a.begin] = T(static_cast<Compute<T>>(a.mean + radius * std::cos(angle)));
        if (2 * pair + 1 >= first && 2 * pair + 1 < last)
          out[2 * pair + 1 - a.begin] =
              T(static_cast<Compute<T>>(a.mean + radius * std::sin(angle)));
      }
    });
  });
}

void uniform(const UniformArgs& a, Exec& exec) {
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* out = static_cast<T*>(a.out);
    for_ranges(exec, a.count, kDrawGrain, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t first = a.begin + begin, last = a.begin + end;
      for (std::int64_t group = first / 4; 4 * group < last; ++group) {
        const auto w = philox(a.key, static_cast<std::uint64_t>(group));
        for (std::int64_t e = std::max(first, 4 * group); e < std::min(last, 4 * group + 4); ++e) {
          const double u = static_cast<double>(unit_float(w[static_cast<std::size_t>(e % 4)]));
          out[e - a.begin] = T(static_cast<Compute<T>>(a.low + (a.high - a.low) * u));
        }
      }
    });
  });
}

}  // namespace tessera::kernels::cpu
