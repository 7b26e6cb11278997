#include "kernels/norm.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/host/cpu.hpp"
#include "kernels/host/norm_row.hpp"
#include "kernels/host/ranges.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

// The row that is normalised: of x, or of the sum after it has been written.
template <class T, class Args>
const T* input_row(const Args& a, std::int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.cols;
  if (a.residual == nullptr) return x;
  T* sum = static_cast<T*>(a.sum) + row * a.cols;
  map(
      sum, a.cols, [](Vec<Compute<T>> u, Vec<Compute<T>> v) { return u + v; }, x,
      static_cast<const T*>(a.residual) + row * a.cols);
  return sum;
}

template <class T>
struct NormedRow {
  const T *x, *weight, *bias;
  Compute<T> mean, rstd;
  void write(T* y, std::int64_t begin, std::int64_t n) const {
    write_normed(y, x + begin, weight == nullptr ? nullptr : weight + begin,
                 bias == nullptr ? nullptr : bias + begin, mean, rstd, n);
  }
  // The largest |y|.
  float magnitude(std::int64_t cols) const {
    constexpr std::int64_t kPart = 512;
    T part[kPart];
    float most = 0;
    for (std::int64_t begin = 0; begin < cols; begin += kPart) {
      const std::int64_t n = std::min(kPart, cols - begin);
      write(part, begin, n);
      most = magnitude_of(part, n, most);
    }
    return most;
  }
};

template <class T>
NormedRow<T> normed_row(const RmsNormArgs& a, std::int64_t row) {
  using C = Compute<T>;
  const T* x = input_row<T>(a, row);
  const C rstd =
      C(1) / std::sqrt(dot_of(x, x, a.cols) / static_cast<C>(a.cols) + static_cast<C>(a.eps));
  static_cast<C*>(a.rstd)[row] = rstd;
  return {x, static_cast<const T*>(a.weight), nullptr, C(0), rstd};
}

template <class T>
NormedRow<T> normed_row(const LayerNormArgs& a, std::int64_t row) {
  using C = Compute<T>;
  const T* x = input_row<T>(a, row);
  const C mean = sum_of(x, a.cols) / static_cast<C>(a.cols);
  const C variance = variation_of(x, a.cols, mean) / static_cast<C>(a.cols);
  const C rstd = C(1) / std::sqrt(variance + static_cast<C>(a.eps));
  static_cast<C*>(a.mean)[row] = mean;
  static_cast<C*>(a.rstd)[row] = rstd;
  return {x, static_cast<const T*>(a.weight), static_cast<const T*>(a.bias), mean, rstd};
}

template <class T, class Args>
void write_rows(const Args& a, std::int64_t row_cost, Exec& exec) {
  for_ranges(exec, a.rows, row_grain(row_cost), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r)
      normed_row<T>(a, r).write(static_cast<T*>(a.y) + r * a.cols, 0, a.cols);
  });
}
// Piece p of the magnitudes has the rows p, p + pieces, ...
template <class T, class Args>
void write_statistics(const Args& a, Exec& exec) {
  const std::int64_t pieces = norm_magnitudes(a.rows);
  parallel_for(exec, pieces, [&](std::int64_t p) {
    float most = 0;
    for (std::int64_t r = p; r < a.rows; r += pieces) {
      const NormedRow<T> row = normed_row<T>(a, r);
      if (a.most != nullptr) most = std::max(most, row.magnitude(a.cols));
    }
    if (a.most != nullptr) a.most[p] = most;
  });
}
template <class Args>
void forward(const Args& a, std::int64_t row_cost, Exec& exec) {
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) <= sizeof(float))
      if (a.y == nullptr) return write_statistics<T>(a, exec);
    write_rows<T>(a, row_cost, exec);
  });
}

// The sums of a row that its dx needs: of g, and of g xhat, with g = dy weight.
template <class C>
struct RowSums {
  C g, g_xhat;
};

template <class T>
RowSums<Compute<T>> row_sums(const T* x, const T* dy, const T* weight, Compute<T> mean,
                             Compute<T> rstd, std::int64_t n) {
  using C = Compute<T>;
  using V = Vec<C>;
  const V center(mean);
  if (weight == nullptr) {
    const auto product = [center](V acc, V v, V d) { return fma(d, v - center, acc); };
    return {sum_of(dy, n), rstd * fold_sum<C>(n, C(0), product, x, dy)};
  }
  const auto product = [center](V acc, V v, V d, V w) { return fma(d * w, v - center, acc); };
  return {dot_of(dy, weight, n), rstd * fold_sum<C>(n, C(0), product, x, dy, weight)};
}

// One row: dx (if wanted), and its part of the parameter gradients, added to w_sum and b_sum (if
// wanted).
template <class T>
void backward_row(const NormBackwardArgs& a, std::int64_t row, Compute<T>* w_sum,
                  Compute<T>* b_sum) {
  using C = Compute<T>;
  const std::int64_t n = a.cols;
  const T *x = static_cast<const T*>(a.x) + row * n, *dy = static_cast<const T*>(a.dy) + row * n;
  const T* weight = static_cast<const T*>(a.weight);
  T* dx = a.dx == nullptr ? nullptr : static_cast<T*>(a.dx) + row * n;
  const T* d_sum = a.d_sum == nullptr ? nullptr : static_cast<const T*>(a.d_sum) + row * n;
  const C rstd = static_cast<const C*>(a.rstd)[row];
  const C mean = a.mean == nullptr ? C(0) : static_cast<const C*>(a.mean)[row];
  RowSums<C> sums{};
  if (dx != nullptr) sums = row_sums(x, dy, weight, mean, rstd, n);
  // RMSNorm subtracts no mean, so nothing flows back through it.
  const Vec<C> g_mean(a.mean == nullptr ? C(0) : sums.g / static_cast<C>(n));
  const Vec<C> product_mean(sums.g_xhat / static_cast<C>(n)), center(mean), scale(rstd);
  for_lanes<C>(n, [&](std::int64_t i, auto io) {
    const Vec<C> d = io.load(dy + i), xhat = (io.load(x + i) - center) * scale;
    if (w_sum != nullptr) io.store(w_sum + i, fma(d, xhat, io.load(w_sum + i)));
    if (b_sum != nullptr) io.store(b_sum + i, io.load(b_sum + i) + d);
    if (dx == nullptr) return;
    const Vec<C> g = weight == nullptr ? d : d * io.load(weight + i);
    const Vec<C> v = scale * (g - g_mean - xhat * product_mean);
    if (d_sum == nullptr) return io.store(dx + i, v);
    const Vec<C> other = io.load(d_sum + i);
    io.store(dx + i, v);  // rounds
    io.store(dx + i, io.load(dx + i) + other);
  });
}

// out = scale * (sum over blocks) + (accumulate ? out : 0), in the order of the blocks.
template <class C, class G>
void add_blocks(const NormBackwardArgs& a, G* out, C* parts, std::int64_t blocks) {
  const std::int64_t n = a.cols;
  for (std::int64_t block = 1; block < blocks; ++block)
    map(parts, n, [](Vec<C> x, Vec<C> y) { return x + y; }, parts, parts + block * n);
  const Vec<C> scale(static_cast<C>(a.scale));
  for_lanes<C>(n, [&](std::int64_t i, auto io) {
    Vec<C> v = blocks == 0 ? Vec<C>(C(0)) : scale * io.load(parts + i);
    if (a.accumulate) v = v + io.load(out + i);
    io.store(out + i, v);
  });
}

template <class T>
void backward(const NormBackwardArgs& a, Exec& exec) {
  using C = Compute<T>;
  const std::int64_t blocks = norm_blocks(a.rows), grain = norm_block_rows(a.rows), n = a.cols;
  const bool wants_w = a.d_weight != nullptr, wants_b = a.d_bias != nullptr;
  C* w_parts = static_cast<C*>(a.workspace);
  C* b_parts = w_parts + (wants_w ? blocks * n : 0);
  for_ranges(exec, a.rows, grain, [&](std::int64_t begin, std::int64_t end) {
    C* w_sum = !wants_w ? nullptr : w_parts + begin / grain * n;
    C* b_sum = !wants_b ? nullptr : b_parts + begin / grain * n;
    if (w_sum != nullptr) std::fill_n(w_sum, n, C(0));
    if (b_sum != nullptr) std::fill_n(b_sum, n, C(0));
    for (std::int64_t r = begin; r < end; ++r) backward_row<T>(a, r, w_sum, b_sum);
  });
  visit_floating(a.grad_dtype, [&](auto tag) {
    using G = typename decltype(tag)::type;
    if constexpr (std::is_same_v<Compute<G>, C>) {
      if (wants_w) add_blocks(a, static_cast<G*>(a.d_weight), w_parts, blocks);
      if (wants_b) add_blocks(a, static_cast<G*>(a.d_bias), b_parts, blocks);
    }
  });
}

}  // namespace

void rms_norm(const RmsNormArgs& a, Exec& exec) { forward(a, 2 * a.cols, exec); }

void layer_norm(const LayerNormArgs& a, Exec& exec) { forward(a, 3 * a.cols, exec); }

void norm_backward(const NormBackwardArgs& a, Exec& exec) {
  visit_floating(a.dtype, [&](auto tag) { backward<typename decltype(tag)::type>(a, exec); });
}

}  // namespace tessera::kernels::cpu
