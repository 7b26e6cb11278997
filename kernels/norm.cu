// RMSNorm and LayerNorm: a group of threads a row, which lies in registers between the passes.
#include "kernels/norm.hpp"

#include <cmath>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/rows.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kKept = 32;  // elements of a thread that stay in registers

// Of RMSNorm where `mean` is null.
template <class T, int N, int kKeep>
struct Forward {
  using C = Compute<T>;
  T *y, *sum;
  C *mean, *rstd;
  const T *x, *residual, *weight, *bias;
  std::int64_t rows;
  int cols, group_size;
  C eps;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const Group group(t, group_size);
    const std::int64_t r = t.block() * (kThreads / group.size) + group.index;
    const bool live = r < rows;
    const std::int64_t at = live ? r * cols : 0;
    Row<T, N, kKeep> row(group, x + at, cols, live);
    if (residual != nullptr) {
      row.each([&](int c, Pack<T, N>& pack) {
        const Pack<T, N> other = load<N>(residual + at + c);
        for (int j = 0; j < N; ++j)
          pack.at[j] = rounded<T>(load_as_compute(pack.at[j]) + load_as_compute(other.at[j]));
        store(sum + at + c, pack);
      });
      row.moved_to(sum + at);
    }
    C* scratch = t.shared<C>();
    C center = 0, squares = 0;
    if (mean != nullptr) {
      C total = 0;
      row.each_value([&](C v) { total += v; });
      center = group_reduce(t, group, total, scratch, Sum{}) / static_cast<C>(cols);
    }
    row.each_value([&](C v) { squares += (v - center) * (v - center); });
    squares = group_reduce(t, group, squares, scratch + kThreads / kWarp, Sum{});
    const C scale = C(1) / std::sqrt(squares / static_cast<C>(cols) + eps);
    if (live && group.lane == 0) {
      rstd[r] = scale;
      if (mean != nullptr) mean[r] = center;
    }
    row.each([&](int c, const Pack<T, N>& pack) { write(y + at + c, c, pack, center, scale); });
  }

  TESSERA_DEVICE void write(T* to, int c, const Pack<T, N>& pack, C center, C scale) const {
    Pack<T, N> out, w, b;
    if (weight != nullptr) w = load<N>(weight + c);
    if (bias != nullptr) b = load<N>(bias + c);
    for (int j = 0; j < N; ++j) {
      C v = (load_as_compute(pack.at[j]) - center) * scale;
      if (weight != nullptr) v *= load_as_compute(w.at[j]);
      if (bias != nullptr) v += load_as_compute(b.at[j]);
      out.at[j] = rounded<T>(v);
    }
    store(to, out);
  }
};

struct ForwardArgs {
  void *y, *mean, *rstd, *sum;
  const void *x, *weight, *bias, *residual;
  std::int64_t rows, cols;
  double eps;
};

void forward(const ForwardArgs& a, DType dtype, Exec& exec) {
  visit_rows<kThreads, kKept>(
      dtype, a.cols, are_aligned(a.y, a.x, a.weight, a.bias, a.residual, a.sum), exec,
      [&](auto tag, auto pack, auto kept, int group) {
        using T = typename decltype(tag)::type;
        using C = Compute<T>;
        const Forward<T, pack(), kept()> body{static_cast<T*>(a.y),
                                              static_cast<T*>(a.sum),
                                              static_cast<C*>(a.mean),
                                              static_cast<C*>(a.rstd),
                                              static_cast<const T*>(a.x),
                                              static_cast<const T*>(a.residual),
                                              static_cast<const T*>(a.weight),
                                              static_cast<const T*>(a.bias),
                                              a.rows,
                                              static_cast<int>(a.cols),
                                              group,
                                              static_cast<C>(a.eps)};
        launch<kThreads>(exec, {blocks_for(a.rows, kThreads / group)},
                         2 * kThreads / kWarp * sizeof(C), body);
      });
}

}  // namespace

void rms_norm(const RmsNormArgs& a, Exec& exec) {
  forward({a.y, nullptr, a.rstd, a.sum, a.x, a.weight, nullptr, a.residual, a.rows, a.cols, a.eps},
          a.dtype, exec);
}

void layer_norm(const LayerNormArgs& a, Exec& exec) {
  forward({a.y, a.mean, a.rstd, a.sum, a.x, a.weight, a.bias, a.residual, a.rows, a.cols, a.eps},
          a.dtype, exec);
}

}  // namespace tessera::kernels::cuda
