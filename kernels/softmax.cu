// Softmax of rows and its derivative: a group of threads a row, which lies in registers between the
// passes where it fits.
#include "kernels/softmax.hpp"

#include <cmath>
#include <limits>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/rows.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kKept = 32;  // elements of a thread and an array that stay in registers

template <class T, int N, int kKeep>
struct Forward {
  using C = Compute<T>;
  T* y;
  const T* x;
  std::int64_t rows;
  int cols, group_size;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const Group group(t, group_size);
    const std::int64_t r = t.block() * (kThreads / group.size) + group.index;
    const bool live = r < rows;
    T* to = y + (live ? r * cols : 0);
    Row<T, N, kKeep> row(group, x + (live ? r * cols : 0), cols, live);
    C* scratch = t.shared<C>();
    C top = -std::numeric_limits<C>::infinity(), total = 0;
    row.each_value([&](C v) { top = Max{}(top, v); });
    top = group_reduce(t, group, top, scratch, Max{});
    row.each_value([&](C v) { total += std::exp(v - top); });
    total = group_reduce(t, group, total, scratch + kWarps, Sum{});
    const C factor = C(1) / total;
    row.each([&](int c, const Pack<T, N>& pack) {
      Pack<T, N> out;
      for (int j = 0; j < N; ++j)
        out.at[j] = rounded<T>(std::exp(load_as_compute(pack.at[j]) - top) * factor);
      store(to + c, out);
    });
  }
};

template <class T, int N, int kKeep>
struct Backward {
  using C = Compute<T>;
  T* dx;
  const T *y, *dy;
  std::int64_t rows;
  int cols, group_size;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const Group group(t, group_size);
    const std::int64_t r = t.block() * (kThreads / group.size) + group.index;
    const bool live = r < rows;
    const std::int64_t at = live ? r * cols : 0;
    Row<T, N, kKeep> out(group, y + at, cols, live), gradient(group, dy + at, cols, live);
    C dot = 0;
    out.each_with(gradient, [&](int, const Pack<T, N>& a, const Pack<T, N>& b) {
      for (int j = 0; j < N; ++j) dot += load_as_compute(a.at[j]) * load_as_compute(b.at[j]);
    });
    dot = group_reduce(t, group, dot, t.shared<C>(), Sum{});
    out.each_with(gradient, [&](int c, const Pack<T, N>& a, const Pack<T, N>& b) {
      Pack<T, N> d;
      for (int j = 0; j < N; ++j)
        d.at[j] = rounded<T>(load_as_compute(a.at[j]) * (load_as_compute(b.at[j]) - dot));
      store(dx + at + c, d);
    });
  }
};

}  // namespace

void softmax(const SoftmaxArgs& a, Exec& exec) {
  if (a.cols == 0) return;
  visit_rows<kThreads, kKept>(
      a.dtype, a.cols, are_aligned(a.y, a.x), exec, [&](auto tag, auto pack, auto kept, int group) {
        using T = typename decltype(tag)::type;
        launch<kThreads>(
            exec, {blocks_for(a.rows, kThreads / group)}, 2 * kWarps * sizeof(Compute<T>),
            Forward<T, pack(), kept()>{static_cast<T*>(a.y), static_cast<const T*>(a.x), a.rows,
                                       static_cast<int>(a.cols), group});
      });
}

void softmax_backward(const SoftmaxBackwardArgs& a, Exec& exec) {
  if (a.cols == 0) return;
  visit_rows<kThreads, kKept>(
      a.dtype, a.cols, are_aligned(a.dx, a.y, a.dy), exec,
      [&](auto tag, auto pack, auto kept, int group) {
        using T = typename decltype(tag)::type;
        launch<kThreads>(exec, {blocks_for(a.rows, kThreads / group)}, kWarps * sizeof(Compute<T>),
                         Backward<T, pack(), kept()>{
                             static_cast<T*>(a.dx), static_cast<const T*>(a.y),
                             static_cast<const T*>(a.dy), a.rows, static_cast<int>(a.cols), group});
      });
}

}  // namespace tessera::kernels::cuda
