// Initial values: a thread draws one group of elements with the CPU's formulas, in f64. Uniform
// values have the CPU's bits; normal ones may differ in the last bit, where log, cos and sin do.
#include <cmath>
#include <numbers>

#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::kernels::cuda {

namespace {

// Stores element e of the whole parameter if it is in the range of `a`.
template <class Args>
TESSERA_DEVICE void put(const Args& a, std::int64_t e, double value) {
  if (e >= a.begin && e < a.begin + a.count) store_number(a.dtype, a.out, e - a.begin, {value});
}

TESSERA_DEVICE double unit(std::uint32_t high, std::uint32_t low) {
  return static_cast<double>(std::uint64_t{high} << 32 | low);
}

struct Normal {
  NormalArgs a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t pair = a.begin / 2 + t.global_index();
    if (2 * pair >= a.begin + a.count) return;
    const auto w = philox(a.key, static_cast<std::uint64_t>(pair));
    const double radius = a.std * std::sqrt(-2 * std::log((unit(w[0], w[1]) + 0.5) * 0x1p-64));
    const double angle = 2 * std::numbers::pi * (unit(w[2], w[3]) * 0x1p-64);
    put(a, 2 * pair, a.mean + rounded_product(radius, std::cos(angle)));
    put(a, 2 * pair + 1, a.mean + rounded_product(radius, std::sin(angle)));
  }
};

struct Uniform {
  UniformArgs a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t group = a.begin / 4 + t.global_index();
    if (4 * group >= a.begin + a.count) return;
    const auto w = philox(a.key, static_cast<std::uint64_t>(group));
    for (int j = 0; j < 4; ++j) {
      const double u = static_cast<double>(unit_float(w[static_cast<std::size_t>(j)]));
      put(a, 4 * group + j, a.low + rounded_product(a.high - a.low, u));
    }
  }
};

// Groups of n elements that meet [begin, begin + count).
std::int64_t groups(std::int64_t begin, std::int64_t count, std::int64_t n) {
  return count == 0 ? 0 : (begin + count - 1) / n - begin / n + 1;
}

}  // namespace

void normal(const NormalArgs& a, Exec& exec) {
  launch<kElementThreads>(exec, Grid{blocks_for(groups(a.begin, a.count, 2), kElementThreads)}, 0,
                          Normal{a});
}

void uniform(const UniformArgs& a, Exec& exec) {
  launch<kElementThreads>(exec, Grid{blocks_for(groups(a.begin, a.count, 4), kElementThreads)}, 0,
                          Uniform{a});
}

}  // namespace tessera::kernels::cuda
