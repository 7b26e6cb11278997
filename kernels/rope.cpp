#include "kernels/rope.hpp"

#include <cmath>

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/simd.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

// Table values come as f32 and are widened where x is f64.
template <class C, class Io>
Vec<C> table_lanes(const float* p, [[maybe_unused]] std::int64_t n, Io io) {
  if constexpr (std::is_same_v<C, float>) {
    return io.load(p);
  } else {
    alignas(64) C lanes[kLanes<C>] = {};
    for (std::int64_t i = 0; i < std::min<std::int64_t>(n, kLanes<C>); ++i)
      lanes[i] = static_cast<C>(p[i]);
    return host::load(lanes);
  }
}

template <class T>
void rotate(T* y, const T* x, const float* cos, const float* sin, std::int64_t half, bool inverse) {
  using C = Compute<T>;
  const Vec<C> sign(inverse ? C(-1) : C(1));
  for_lanes<C>(half, [&](std::int64_t i, auto io) {
    const Vec<C> c = table_lanes<C>(cos + i, half - i, io),
                 s = sign * table_lanes<C>(sin + i, half - i, io);
    const Vec<C> low = io.load(x + i), high = io.load(x + i + half);
    io.store(y + i, low * c - high * s);
    io.store(y + i + half, fma(high, c, low * s));
  });
}

}  // namespace

void rope(const RopeArgs& a, Exec& exec) {
  const std::int64_t half = a.head_dim / 2, length = a.length;
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_ranges(exec, a.batch * length, row_grain(std::int64_t{a.heads} * a.head_dim),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) {
                   const std::int64_t b = row / length, t = row % length, p = t + a.position;
                   const T* x =
                       static_cast<const T*>(a.x) + b * a.x_strides[0] + t * a.x_strides[1];
                   T* y = static_cast<T*>(a.y) + b * a.y_strides[0] + t * a.y_strides[1];
                   for (std::int64_t h = 0; h < a.heads; ++h)
                     rotate(y + h * a.y_strides[2], x + h * a.x_strides[2], a.cos + p * half,
                            a.sin + p * half, half, a.inverse);
                 }
               });
  });
}

void rope_table(const RopeTableArgs& a, Exec& exec) {
  const std::int64_t half = a.head_dim / 2;
  for_ranges(exec, a.positions, row_grain(16 * half), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double frequency =
          std::pow(a.theta, -2.0 * static_cast<double>(i) / static_cast<double>(a.head_dim));
      for (std::int64_t p = begin; p < end; ++p) {
        const double angle = static_cast<double>(p) * frequency;
        a.cos[p * half + i] = static_cast<float>(std::cos(angle));
        a.sin[p * half + i] = static_cast<float>(std::sin(angle));
      }
    }
  });
}

}  // namespace tessera::kernels::cpu
