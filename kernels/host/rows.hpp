// What kernels do along contiguous elements: maps, sums and maxima, with one order of additions for
// every length.
#pragma once

#include "kernels/host/math.hpp"

namespace tessera::kernels::host {

// out[i] = f(a[i], ...) over n contiguous elements; `out` may be one of the inputs.
template <class Out, class F, class... In>
inline void map(Out* out, std::int64_t n, F f, const In*... in) {
  for_lanes<Compute<Out>>(
      n, [&](std::int64_t i, auto io) { io.store(out + i, f(io.load(in + i)...)); });
}

// f folded over n contiguous elements into an accumulator per lane and unroll step: acc = f(acc,
// a[i], ...). Missing elements of the tail read as `pad`, where f must leave its accumulator alone.
// The partial sums are added in pairs.
template <class C, class F, class... In>
inline C fold_lanes(std::int64_t n, C pad, F f, const In*... in) {
  constexpr int step = kLanes<C>;
  Vec<C> a0(C(0)), a1(C(0)), a2(C(0)), a3(C(0));
  std::int64_t i = 0;
  for (; i + 4 * step <= n; i += 4 * step) {
    a0 = f(a0, load(in + i)...);
    a1 = f(a1, load(in + i + step)...);
    a2 = f(a2, load(in + i + 2 * step)...);
    a3 = f(a3, load(in + i + 3 * step)...);
  }
  for (; i + step <= n; i += step) a0 = f(a0, load(in + i)...);
  if (i < n) a1 = f(a1, load_padded(in + i, n - i, pad)...);
  return sum((a0 + a1) + (a2 + a3));
}

// Sums of at most kSumBlock terms are folded at once, longer ones by halves: errors grow with the
// logarithm of n.
inline constexpr std::int64_t kSumBlock = 1024;
template <class C, class F, class... In>
C fold_sum(std::int64_t n, C pad, F f, const In*... in) {
  if (n <= kSumBlock) return fold_lanes<C>(n, pad, f, in...);
  const std::int64_t half = (n / 2 + kSumBlock - 1) / kSumBlock * kSumBlock;
  return fold_sum<C>(half, pad, f, in...) + fold_sum<C>(n - half, pad, f, (in + half)...);
}

// Sums over n contiguous elements: x, x^2, x y, (x - shift)^2, exp(x - shift).
template <class T>
inline Compute<T> sum_of(const T* x, std::int64_t n) {
  using V = Vec<Compute<T>>;
  return fold_sum<Compute<T>>(n, 0, [](V acc, V v) { return acc + v; }, x);
}
template <class T>
inline Compute<T> dot_of(const T* x, const T* y, std::int64_t n) {
  using V = Vec<Compute<T>>;
  return fold_sum<Compute<T>>(n, 0, [](V acc, V v, V w) { return fma(v, w, acc); }, x, y);
}
template <class T>
inline Compute<T> variation_of(const T* x, std::int64_t n, Compute<T> shift) {
  using V = Vec<Compute<T>>;
  const V center(shift);
  return fold_sum<Compute<T>>(
      n, shift,
      [center](V acc, V v) {
        const V d = v - center;
        return fma(d, d, acc);
      },
      x);
}
template <class T>
inline Compute<T> exp_sum_of(const T* x, std::int64_t n, Compute<T> shift) {
  using V = Vec<Compute<T>>;
  const V top(shift);
  return fold_sum<Compute<T>>(
      n, -std::numeric_limits<Compute<T>>::infinity(),
      [top](V acc, V v) { return acc + exp(v - top); }, x);
}

// The largest of n > 0 elements, NaN if one is NaN.
template <class T>
inline Compute<T> max_of(const T* p, std::int64_t n) {
  using C = Compute<T>;
  Vec<C> best(static_cast<C>(p[0]));
  std::int64_t i = 0;
  for (; i + kLanes<C> <= n; i += kLanes<C>) best = max(best, load(p + i));
  alignas(64) C lanes[kLanes<C>];
  store(lanes, best);
  C result = lanes[0];
  const auto take = [&result](C x) { result = x > result || x != x ? x : result; };
  for (int lane = 1; lane < kLanes<C>; ++lane) take(lanes[lane]);
  for (; i < n; ++i) take(static_cast<C>(p[i]));
  return result;
}

// The largest of `most` and |x| of n elements; a NaN is none.
template <class T>
inline float magnitude_of(const T* x, std::int64_t n, float most = 0) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float magnitude = std::abs(static_cast<float>(x[i]));
    if (magnitude > most) most = magnitude;
  }
  return most;
}

}  // namespace tessera::kernels::host
