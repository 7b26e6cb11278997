// RMSNorm and LayerNorm: a group of threads a row, which lies in registers between the passes.
#include "kernels/norm.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/norm_row.hpp"
#include "kernels/cuda/rows.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kKept = 32;  // elements of a thread that stay in registers

// kCenters: of LayerNorm, else of RMSNorm.
template <class T, int N, int kKeep, bool kCenters>
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
    with_row(t, group, r, [&](auto& row, C center, C scale) {
      row.each([&](int c, const Pack<T, N>& x) {
        const NormColumns<T, N, kCenters> columns(weight, bias, c);
        Pack<T, N> out;
        for (int j = 0; j < N; ++j)
          out.at[j] = rounded<T>(columns.get(load_as_compute(x.at[j]), j, center, scale));
        store(y + r * cols + c, out);
      });
    });
  }

  // Writes the statistics of row r, if there is one, then f(row, mean, rstd).
  template <class F>
  TESSERA_DEVICE void with_row(Thread& t, const Group& group, std::int64_t r, F f) const {
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
    if constexpr (kCenters) {
      C total = 0;
      row.each_value([&](C v) { total += v; });
      center = group_reduce(t, group, total, scratch, Sum{}) / static_cast<C>(cols);
    }
    row.each_value([&](C v) {
      const C z = kCenters ? v - center : v;
      squares += z * z;
    });
    squares = group_reduce(t, group, squares, scratch + kThreads / kWarp, Sum{});
    const C scale = C(1) / std::sqrt(squares / static_cast<C>(cols) + eps);
    if (live && group.lane == 0) {
      rstd[r] = scale;
      if constexpr (kCenters) mean[r] = center;
    }
    f(row, center, scale);
  }
};

// What Forward would write is looked at, and left unwritten: a block goes through many rows, so
// that there are no more magnitudes than blocks. To round the largest is to find the largest
// rounded one.
template <class T, int N, int kKeep, bool kCenters>
struct Statistics {
  static constexpr int kBlocks = sizeof(T) == 2 ? 3 : 2;
  Forward<T, N, kKeep, kCenters> of;
  float* most;  // of `pieces`; may be null
  std::int64_t pieces;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const Group group(t, of.group_size);
    const std::int64_t at_once = kThreads / group.size;
    float largest = 0;
    for (std::int64_t first = t.block() * at_once; first < of.rows; first += t.blocks() * at_once) {
      of.with_row(t, group, first + group.index, [&](auto& row, float center, float scale) {
        if (most == nullptr) return;
        row.each([&](int c, const Pack<T, N>& x) {
          const NormColumns<T, N, kCenters> columns(of.weight, of.bias, c);
          for (int j = 0; j < N; ++j)
            largest = std::fmax(largest,
                                std::abs(columns.get(load_as_compute(x.at[j]), j, center, scale)));
        });
      });
      t.sync();  // its sums are read
    }
    if (most == nullptr) return;
    largest = block_reduce<kThreads>(t, largest, t.shared<float>(), LargerMagnitude{});
    if (t.index() == 0)
      for (std::int64_t p = t.block(); p < pieces; p += t.blocks()) {
        most[p] = load_as_compute(rounded<T>(largest));
        largest = 0;
      }
  }
};

struct ForwardArgs {
  void *y, *mean, *rstd, *sum;
  const void *x, *weight, *bias, *residual;
  std::int64_t rows, cols;
  double eps;
  float* most;
};

template <bool kCenters>
void forward(const ForwardArgs& a, DType dtype, Exec& exec) {
  visit_rows<kThreads, kKept>(
      dtype, a.cols, are_aligned(a.y, a.x, a.weight, a.bias, a.residual, a.sum), exec,
      [&](auto tag, auto pack, auto kept, int group) {
        using T = typename decltype(tag)::type;
        using C = Compute<T>;
        const Forward<T, pack(), kept(), kCenters> body{static_cast<T*>(a.y),
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
        constexpr std::size_t kShared = 2 * kThreads / kWarp * sizeof(C);
        const std::int64_t blocks = blocks_for(a.rows, kThreads / group);
        if (a.y != nullptr) return launch<kThreads>(exec, {blocks}, kShared, body);
        if constexpr (sizeof(T) <= sizeof(float)) {
          const std::int64_t pieces = norm_magnitudes(a.rows);
          launch<kThreads>(exec, {std::min(blocks, pieces)}, kShared,
                           Statistics<T, pack(), kept(), kCenters>{body, a.most, pieces});
        }
      });
}

}  // namespace

void rms_norm(const RmsNormArgs& a, Exec& exec) {
  forward<false>({a.y, nullptr, a.rstd, a.sum, a.x, a.weight, nullptr, a.residual, a.rows, a.cols,
                  a.eps, a.most},
                 a.dtype, exec);
}

void layer_norm(const LayerNormArgs& a, Exec& exec) {
  forward<true>({a.y, a.mean, a.rstd, a.sum, a.x, a.weight, a.bias, a.residual, a.rows, a.cols,
                 a.eps, a.most},
                a.dtype, exec);
}

}  // namespace tessera::kernels::cuda
