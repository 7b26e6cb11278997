// The backward pass of RMSNorm and LayerNorm: one pass over x and dy, one over the parts of the
// parameter gradients.
#include <algorithm>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/rows.hpp"
#include "kernels/norm.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;       // of the kernels that take any row
constexpr int kFoldThreads = 1024;  // few columns make few blocks: many loads in each

// The pointers of the backward pass, and the row sums that dx needs; kLayer: with a mean.
template <class T>
struct BackwardArrays {
  using C = Compute<T>;
  T* dx;
  C *w_parts, *b_parts;  // [blocks, cols] each, null where not wanted
  const T *x, *dy, *weight, *d_sum;
  const C *mean, *rstd;
  std::int64_t rows;
  int cols, group_size;

  // The norm's part of dx of one element: `g` and `xhat` are its own, the others the row's.
  TESSERA_DEVICE T gradient(C g, C xhat, C g_mean, C product_mean, C scale) const {
    return rounded<T>(scale * (g - g_mean - xhat * product_mean));
  }
};

// One pass over x and dy. A group goes from row to row, with the next row under way (kAhead) while
// it sums over the present one; weights and parameter gradients stay in registers until the end.
//
//   row i      x dy in registers ── sums ── barrier ── dx
//   row i + 1  loads ─────────────────────────────────┘
template <class T, bool kLayer, int kBlock, int kPacks, bool kAhead>
struct Backward : BackwardArrays<T> {
  using C = Compute<T>;
  using Base = BackwardArrays<T>;
  static constexpr int N = kPack<T>, kKept = kPacks * N, kWarps = kBlock / kWarp;
  static constexpr int kSums = kLayer ? 2 : 1;  // over a row: of g xhat, and of g
  static constexpr int kBlocks = kBlock == 256 && kAhead ? 2 : 0;

  struct Line {
    Held<T, N> x[kPacks], dy[kPacks];
    C center, scale;
  };

  TESSERA_DEVICE int column(const Group& group, int k) const {
    return (group.lane + k * group.size) * N;
  }
  TESSERA_DEVICE void fetch(const Group& group, std::int64_t row, Line& line) const {
    if (row >= this->rows) return;
    for (int k = 0; k < kPacks; ++k) {
      const int c = column(group, k);
      if (c >= this->cols) continue;
      line.x[k] = load_held<N>(this->x + row * this->cols + c);
      line.dy[k] = load_held<N>(this->dy + row * this->cols + c);
    }
    line.scale = this->rstd[row];
    line.center = kLayer ? this->mean[row] : C(0);
  }

  TESSERA_DEVICE void operator()(Thread& t) const {
    const Group group(t, this->group_size);
    const int groups = kBlock / group.size;
    Held<T, N> weights[kPacks];
    for (int k = 0; k < kPacks; ++k)
      if (kAhead && column(group, k) < this->cols) weights[k] = weight_at(column(group, k));
    C w_sum[kKept] = {}, b_sum[kLayer ? kKept : 1] = {};
    C* scratch = t.shared<C>();
    Line next;
    if constexpr (kAhead) fetch(group, t.block() * groups + group.index, next);
    int turn = 0;  // which half of the scratch: a barrier lies between its uses
    for (std::int64_t first = t.block() * groups; first < this->rows;
         first += t.blocks() * groups, turn ^= 1) {
      const std::int64_t row = first + group.index;
      if constexpr (!kAhead) fetch(group, row, next);
      const Line line = next;
      if constexpr (kAhead) fetch(group, row + t.blocks() * groups, next);
      finish_row(t, group, row, line, weights, w_sum, b_sum, scratch + kSums * kWarps * turn);
    }
    C* merged = scratch + 2 * kSums * kWarps;
    if (this->w_parts != nullptr) merge(t, group, w_sum, merged, this->w_parts);
    if constexpr (kLayer)
      if (this->b_parts != nullptr) merge(t, group, b_sum, merged, this->b_parts);
  }

  TESSERA_DEVICE Held<T, N> weight_at(int c) const {
    if (this->weight != nullptr) return load_held<N>(this->weight + c);
    Pack<T, N> ones;
    for (T& one : ones.at) one = rounded<T>(1);
    return ones;
  }
  // f(j, d, xhat, g) for the elements of pack k, which begins at column c.
  template <class F>
  TESSERA_DEVICE void each(const Line& line, const Held<T, N>* weights, int k, int c, F f) const {
    const Pack<T, N> x = line.x[k], dy = line.dy[k], w = kAhead ? weights[k] : weight_at(c);
    for (int j = 0; j < N; ++j) {
      const C d = load_as_compute(dy.at[j]);
      f(j, d, (load_as_compute(x.at[j]) - line.center) * line.scale, d * load_as_compute(w.at[j]));
    }
  }
  TESSERA_DEVICE void finish_row(Thread& t, const Group& group, std::int64_t row, const Line& line,
                                 const Held<T, N>* weights, C* w_sum, C* b_sum, C* scratch) const {
    const int cols = row < this->rows ? this->cols : 0;
    const std::int64_t at = row * this->cols;
    Held<T, N> other[kPacks];
    C sums[kSums] = {};
    for (int k = 0; k < kPacks; ++k) {
      const int c = column(group, k);
      if (c >= cols) continue;
      if (this->d_sum != nullptr) other[k] = load_held<N>(this->d_sum + at + c);
      each(line, weights, k, c, [&](int j, C d, C xhat, C g) {
        sums[0] += g * xhat;
        w_sum[k * N + j] += d * xhat;
        if constexpr (kLayer) {
          sums[1] += g;
          b_sum[k * N + j] += d;
        }
      });
    }
    if (this->dx == nullptr) return;
    add_up(t, group, sums, scratch);
    const C inverse = C(1) / static_cast<C>(this->cols);
    const C product_mean = sums[0] * inverse, g_mean = kLayer ? sums[kSums - 1] * inverse : C(0);
    for (int k = 0; k < kPacks; ++k) {
      const int c = column(group, k);
      if (c >= cols) continue;
      Pack<T, N> part;
      each(line, weights, k, c, [&](int j, C, C xhat, C g) {
        part.at[j] = this->gradient(g, xhat, g_mean, product_mean, line.scale);
      });
      Held<T, N> out = part;
      if (this->d_sum != nullptr) {
        const Pack<T, N> own = out, more = other[k];
        for (int j = 0; j < N; ++j)
          part.at[j] = rounded<T>(load_as_compute(own.at[j]) + load_as_compute(more.at[j]));
        out = part;
      }
      store_whole(this->dx + at + c, &out);
    }
  }

  // Each of `sums` over the group, on every thread of it, behind one barrier: lanes add up what the
  // group's warps have, in few instructions for a row.
  TESSERA_DEVICE void add_up(Thread& t, const Group& group, C (&sums)[kSums], C* scratch) const {
    for (C& sum : sums) sum = warp_reduce(t, sum, Sum{});
    if (group.size == kWarp) return;
    if (t.lane() == 0)
      for (int i = 0; i < kSums; ++i) scratch[t.warp() * kSums + i] = sums[i];
    t.sync();
    const int warps = group.size / kWarp, warp = group.index * warps + (t.lane() & (warps - 1));
    for (int i = 0; i < kSums; ++i) sums[i] = scratch[warp * kSums + i];
    for (int mask = warps / 2; mask > 0; mask /= 2)
      for (C& sum : sums) sum += t.shuffle_xor(sum, mask);
  }

  // The block's part: its groups' sums, in their order.
  TESSERA_DEVICE void merge(Thread& t, const Group& group, const C* sums, C* merged,
                            C* parts) const {
    t.sync();
    for (int k = 0; k < kPacks; ++k)
      for (int j = 0; j < N; ++j)
        if (column(group, k) < this->cols)
          merged[group.index * this->cols + column(group, k) + j] = sums[k * N + j];
    t.sync();
    for (int c = t.index(); c < this->cols; c += kBlock) {
      C total = 0;
      for (int g = 0; g < kBlock / group.size; ++g) total += merged[g * this->cols + c];
      parts[t.block() * this->cols + c] = total;
    }
  }
};

// Any row, element by element: a block a row, parameter gradients added up in the block's part.
template <class T>
struct BackwardAny : BackwardArrays<T> {
  using C = Compute<T>;

  TESSERA_DEVICE void operator()(Thread& t) const {
    int turn = 0;
    for (std::int64_t row = t.block(); row < this->rows; row += t.blocks(), turn ^= 1)
      finish_row(t, row, row == t.block(), t.shared<C>() + 2 * kThreads / kWarp * turn);
  }
  TESSERA_DEVICE void finish_row(Thread& t, std::int64_t row, bool first, C* scratch) const {
    const T *x = this->x + row * this->cols, *dy = this->dy + row * this->cols;
    const C scale = this->rstd[row], center = this->mean != nullptr ? this->mean[row] : C(0);
    const auto weighted = [&](int c) {
      const C d = load_as_compute(dy[c]);
      return this->weight != nullptr ? d * load_as_compute(this->weight[c]) : d;
    };
    C g_sum = 0, product = 0;
    for (int c = t.index(); c < this->cols; c += kThreads) {
      const C g = weighted(c);
      g_sum += g;
      product += g * ((load_as_compute(x[c]) - center) * scale);
    }
    const C n = static_cast<C>(this->cols);
    g_sum = block_reduce<kThreads>(t, g_sum, scratch, Sum{});
    product = block_reduce<kThreads>(t, product, scratch + kThreads / kWarp, Sum{}) / n;
    const C g_mean = this->mean != nullptr ? g_sum / n : C(0);
    C* w_part = this->w_parts == nullptr ? nullptr : this->w_parts + t.block() * this->cols;
    C* b_part = this->b_parts == nullptr ? nullptr : this->b_parts + t.block() * this->cols;
    for (int c = t.index(); c < this->cols; c += kThreads) {
      const C d = load_as_compute(dy[c]), xhat = (load_as_compute(x[c]) - center) * scale;
      if (w_part != nullptr) w_part[c] = (first ? C(0) : w_part[c]) + d * xhat;
      if (b_part != nullptr) b_part[c] = (first ? C(0) : b_part[c]) + d;
      if (this->dx == nullptr) continue;
      const std::int64_t at = row * this->cols + c;
      const T own = this->gradient(weighted(c), xhat, g_mean, product, scale);
      this->dx[at] = this->d_sum == nullptr
                         ? own
                         : rounded<T>(load_as_compute(own) + load_as_compute(this->d_sum[at]));
    }
  }
};

// out = scale (sum of the parts) + (accumulate ? out : 0). A block has 32 columns and adds up a
// share of the parts in each warp; block_y is the array.
template <class T>
struct FoldParts {
  using C = Compute<T>;
  void* out[2];
  const C* parts[2];  // [count, cols]
  std::int64_t count;
  int cols;
  C scale;
  bool wide, accumulate;  // out is f32 though T is not

  TESSERA_DEVICE void operator()(Thread& t) const {
    const int c = static_cast<int>(t.block()) * kWarp + t.lane();
    C total = 0;
    if (c < cols)
      for (std::int64_t p = t.warp(); p < count; p += kFoldThreads / kWarp)
        total += parts[t.block_y()][p * cols + c];
    C* shared = t.shared<C>();
    shared[t.index()] = total;
    t.sync();
    if (t.warp() != 0 || c >= cols) return;
    for (int w = 1; w < kFoldThreads / kWarp; ++w) total += shared[w * kWarp + t.lane()];
    if (wide)
      write(static_cast<float*>(out[t.block_y()]) + c, total);
    else
      write(static_cast<T*>(out[t.block_y()]) + c, total);
  }
  template <class G>
  TESSERA_DEVICE void write(G* to, C total) const {
    const C old = accumulate ? static_cast<C>(load_as_compute(*to)) : C(0);
    *to = rounded<G>(scale * total + old);
  }
};

// Where the parts of the parameter gradients lie: in the stream's workspace, or in the contract's,
// which has room for fewer.
struct Parts {
  void* at;
  std::int64_t count;
};
Parts parts_for(const NormBackwardArgs& a, const Exec& exec, std::int64_t wanted) {
  const std::int64_t few = norm_blocks(a.rows);
  const std::int64_t one = norm_workspace_bytes(1, a.cols, a.dtype, a.d_weight, a.d_bias);
  if (one == 0) return {nullptr, wanted};
  const auto fit =
      exec.workspace == nullptr ? 0 : static_cast<std::int64_t>(exec.workspace_bytes) / one;
  if (wanted <= few || fit <= few) return {a.workspace, std::min(wanted, few)};
  return {exec.workspace, std::min(wanted, fit)};
}

template <class T, class Body, int kBlock>
void launch_backward(const NormBackwardArgs& a, Exec& exec, int group, std::int64_t blocks,
                     std::size_t shared) {
  using C = Compute<T>;
  const std::int64_t wanted = std::min(blocks, blocks_for(a.rows, kBlock / group));
  const Parts parts = parts_for(a, exec, wanted);
  C* w_parts = a.d_weight == nullptr ? nullptr : static_cast<C*>(parts.at);
  C* b_parts = a.d_bias == nullptr
                   ? nullptr
                   : static_cast<C*>(parts.at) + (w_parts == nullptr ? 0 : parts.count * a.cols);
  Body body;
  static_cast<BackwardArrays<T>&>(body) = {static_cast<T*>(a.dx),
                                           w_parts,
                                           b_parts,
                                           static_cast<const T*>(a.x),
                                           static_cast<const T*>(a.dy),
                                           static_cast<const T*>(a.weight),
                                           static_cast<const T*>(a.d_sum),
                                           static_cast<const C*>(a.mean),
                                           static_cast<const C*>(a.rstd),
                                           a.rows,
                                           a.cols,
                                           group};
  launch<kBlock>(exec, {parts.count}, shared * sizeof(C), body);
  // Without rows there are no parts, so that their address may be null: sums are 0.
  const bool wants_w = a.d_weight != nullptr, wants_b = a.d_bias != nullptr;
  if (!wants_w && !wants_b) return;
  const FoldParts<T> fold{{wants_w ? a.d_weight : a.d_bias, a.d_bias},
                          {wants_w ? w_parts : b_parts, b_parts},
                          parts.count,
                          a.cols,
                          static_cast<C>(a.scale),
                          a.grad_dtype != a.dtype,
                          a.accumulate};
  launch<kFoldThreads>(exec, {blocks_for(a.cols, kWarp), wants_w && wants_b ? 2 : 1},
                       kFoldThreads * sizeof(C), fold);
}

// kBlocks: as many as run at once on 132 multiprocessors.
template <class T, int kBlock, int kPacks, int kBlocks, bool kAhead>
bool launch_packed(const NormBackwardArgs& a, Exec& exec) {
  constexpr int kKept = kPacks * kPack<T>;
  if (a.cols > kBlock * kKept) return false;
  const int group = group_for<kBlock>(a.cols, kKept);
  const auto shared = static_cast<std::size_t>(4 * kBlock / kWarp + kBlock / group * a.cols);
  if (a.mean != nullptr)
    launch_backward<T, Backward<T, true, kBlock, kPacks, kAhead>, kBlock>(a, exec, group, kBlocks,
                                                                          shared);
  else
    launch_backward<T, Backward<T, false, kBlock, kPacks, kAhead>, kBlock>(a, exec, group, kBlocks,
                                                                           shared);
  return true;
}

}  // namespace

void norm_backward(const NormBackwardArgs& a, Exec& exec) {
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) < 8) {
      // A wide row of f32 leaves no registers for the next one.
      constexpr bool narrow = sizeof(T) == 2;
      constexpr int packs = narrow ? 2 : 4;
      if (a.cols % kPack<T> == 0 && are_aligned(a.dx, a.x, a.dy, a.weight, a.d_sum) &&
          (launch_packed<T, 256, 2, 264, true>(a, exec) ||
           launch_packed<T, 512, packs, 132, narrow>(a, exec)))
        return;
    }
    launch_backward<T, BackwardAny<T>, kThreads>(a, exec, kThreads, 528, 4 * kThreads / kWarp);
  });
}

}  // namespace tessera::kernels::cuda
