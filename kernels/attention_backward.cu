// Attention's backward pass for 16-bit heads on tensor cores: seven products where five would do
// with atomics, no [T, T] memory, and sums in one order, so equal calls give equal bits.
//
//   delta   rows of do o, and lse in powers of 2, into the workspace; then in one launch
//   dk, dv  a block is 128 keys:     K V │ Q0 dO0 │ Q1 dO1 │ ...  -> dk, dv, of each head in turn
//   dq      a block is 128 queries:  Q dO │ K0 V0 │ K1 V1 │ ...   -> dq
//
// Both walk alike: the tiles that stay, x and y, lie in registers; those that come, u and w, are
// brought by asynchronous copies into two stages of shared memory. Of 16 columns at a time,
//
//   s = x u^T    p = exp(scale s - lse)    dp = y w^T    ds = p (dp - delta)
//   first += ds u (dk or dq)               second += p w (dv)
//
// where rows are keys or queries as the block's are: so what a product leaves in registers is, once
// rounded, what the next one takes, and p and ds never visit shared memory. A masked element counts
// 0 times: a NaN or an infinity in its values still shows.
// On sm_90 warpgroups walk instead: attention_backward_hopper.cu.
// Source: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning",
// 2023.
#include <limits>
#include <numbers>

#include "kernels/cuda/attention_backward.hpp"
#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {

namespace {

using attention_tiles::Head;
using attention_tiles::head_of;

constexpr int kRows = kAttentionTile;  // of a block

// Sizes for heads of up to kDim elements: 64 or 128.
template <int kDim>
struct Shape {
  static constexpr int kTiles = 128 / kDim;  // of 16 rows, of a warp
  static constexpr int kThreads = kRows / kTiles / 16 * kWarp;
  static constexpr int kPitch = kDim + 8;       // 8 rows meet each bank once
  static constexpr int kColumns = 64 * kTiles;  // of a stage
  static constexpr int kStage = 2 * kColumns * kPitch;
  static constexpr std::size_t kTileBytes = 2 * 2 * kStage;  // also the tiles that stay, at first
  static constexpr std::size_t kBytes = kTileBytes + 2 * 2 * kColumns * sizeof(float);
};

template <class T, int kDim>
struct Delta {
  AttentionBackwardArgs a;
  AttentionStatistics to;

  static constexpr int kThreads = 256, kLanes = kDim / 8, kRowsOfBlock = kThreads / kLanes;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const auto block = static_cast<int>(t.block());
    const int blocks_of_head = to.length / kRowsOfBlock, head = block / blocks_of_head;
    const int at = block % blocks_of_head * kRowsOfBlock + t.index() / kLanes;
    const int d = t.index() % kLanes * 8;
    const bool there = at < a.length && d < a.head_dim;
    float sum = 0;
    if (there) {
      const auto of = [&](const void* base) {
        const auto from =
            head_of<const T>(base, a.heads, head / a.heads, head % a.heads, a.length, a.head_dim);
        return load<8>(from.data + at * from.stride + d);
      };
      const auto x = of(a.o), y = of(a.d_o);
      for (int i = 0; i < 8; ++i) sum += load_as_compute(x.at[i]) * load_as_compute(y.at[i]);
    }
    for (int mask = 1; mask < kLanes; mask *= 2) sum += t.shuffle_xor(sum, mask);
    if (d != 0) return;
    const std::int64_t row = std::int64_t{head} * to.length + at;
    const float* lse = static_cast<const float*>(a.lse) + std::int64_t{head} * a.length + at;
    to.lse[row] = at < a.length ? *lse * std::numbers::log2e_v<float>
                                : std::numeric_limits<float>::infinity();
    to.delta[row] = sum;
  }
};

// Blocks of keys, then blocks of queries, in one grid: the shorter fill what the longer leave idle.
// Two of 4 warps run on a multiprocessor, or for wide heads one of 8. What a tile's copies
// need is computed anew for each (`fresh`): registers are full.
template <class T, int kDim>
struct Backward {
  AttentionBackwardArgs a;
  AttentionStatistics statistics;

  using S = Shape<kDim>;
  static constexpr int kBlocks = kDim == 64 ? 2 : 1;
  static constexpr int kTiles = S::kTiles, kSteps = kDim / 16, kPitch = S::kPitch;
  static constexpr int kColumns = S::kColumns;

  using Fragments = std::uint32_t[kTiles][kSteps][4];
  using Sums = float[kTiles][2 * kSteps][4];

  struct Position {
    int batch, head, first, row, lane;  // `first` is the block's first row, `row` the warp's
  };

  TESSERA_DEVICE int tiles() const { return (a.length - 1) / kRows + 1; }

  template <bool kOfKeys>
  TESSERA_DEVICE Position position(Thread& t) const {
    const int heads = kOfKeys ? a.kv_heads : a.heads, other = fresh(static_cast<int>(t.block()));
    // The longest walks first: the first keys, the last queries.
    const int y = fresh(t.block_y()), tile = kOfKeys ? y : 2 * tiles() - 1 - y;
    return {other / heads, other % heads, tile * kRows, tile * kRows + t.warp() * kTiles * 16,
            t.lane()};
  }

  // The columns that a block's rows see, and in how many steps they come.
  struct Range {
    int begin, end, steps;
  };
  template <bool kOfKeys>
  TESSERA_DEVICE Range range(const Position& at) const {
    const int begin = kOfKeys && a.causal ? at.first : 0;
    const int last = !kOfKeys && a.causal ? at.first + kRows : a.length;
    const int end = last < a.length ? last : a.length;
    return {begin, end, (end - begin + kColumns - 1) / kColumns};
  }

  TESSERA_DEVICE Head<const T> head(const void* base, int row_heads, const Position& at,
                                    int head) const {
    return head_of<const T>(base, row_heads, at.batch, head, a.length, a.head_dim);
  }

  // kCount rows from `first` on; zeros beyond the last row and column.
  template <int kCount>
  TESSERA_DEVICE void bring(Thread& t, T* tile, const Head<const T>& from, int first) const {
    constexpr int across = kDim / 8, per_pass = S::kThreads / across;
    const int index = fresh(t.index()), r = index / across, d = index % across * 8;
    const T* row = from.data + (first + r) * from.stride + d;
    const std::int64_t pass = per_pass * from.stride;
    const bool inside = d < a.head_dim;
    for (int i = 0; i < kCount; i += per_pass, row += pass)
      t.copy_async(tile + (r + i) * kPitch + d, row, inside && first + r + i < a.length);
  }

  TESSERA_DEVICE void keep(Thread& t, Fragments& x, const T* tile) const {
    const int lane = t.lane();
    const T* row = tile + (t.warp() * kTiles * 16 + lane % 16) * kPitch + lane / 16 * 8;
    unrolled<kTiles>([&](int m) {
      unrolled<kSteps>([&](int k) { t.load_matrices(x[m][k], row + m * 16 * kPitch + k * 16); });
    });
  }

  // Adds 16 columns from `column` on, whose rows of u and w begin at `u` and `w` and whose
  // statistics at `lse`, where they are columns', or are the rows' in `of_rows`.
  template <bool kOfKeys>
  TESSERA_DEVICE void add(Thread& t, Sums& first, Sums& second, const Fragments& x,
                          const Fragments& y, const T* u, const T* w, const float* lse,
                          const float (&of_rows)[kTiles][2][2], const Position& at,
                          int column) const {
    const int lane = at.lane, pair = lane % 4 * 2;
    const int across = (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8;
    float s[kTiles][2][4] = {}, dp[kTiles][2][4] = {};
    unrolled<kSteps>([&](int k) {
      std::uint32_t b[4], c[4];
      t.load_matrices(b, u + across + k * 16);
      t.load_matrices(c, w + across + k * 16);
      unrolled<kTiles>([&](int m) {
        t.template multiply<T>(s[m][0], x[m][k], b[0], b[1]);
        t.template multiply<T>(s[m][1], x[m][k], b[2], b[3]);
        t.template multiply<T>(dp[m][0], y[m][k], c[0], c[1]);
        t.template multiply<T>(dp[m][1], y[m][k], c[2], c[3]);
      });
    });

    const float factor = a.scale * std::numbers::log2e_v<float>;
    const bool is_whole = kOfKeys ? !a.causal || column >= at.row + kTiles * 16 - 1
                                  : column + 16 <= a.length && (!a.causal || column + 15 <= at.row);
    const int row = at.row + lane / 4, first_past = column + pair - row, visible = a.length - row;
    std::uint32_t ps[kTiles][4], ds[kTiles][4];
    unrolled<2>([&](int n) {
      Pack<float, 2> column_lse{}, column_delta{};
      if constexpr (kOfKeys) {
        column_lse = load<2>(lse + n * 8 + pair);
        column_delta = load<2>(lse + kColumns + n * 8 + pair);
      }
      unrolled<kTiles>([&](int m) {
        float p[4], d[4];
        unrolled<4>([&](int i) {
          const float l = kOfKeys ? column_lse.at[i % 2] : of_rows[m][i / 2][0];
          const float delta = kOfKeys ? column_delta.at[i % 2] : of_rows[m][i / 2][1];
          p[i] = exp2_fast(s[m][n][i] * factor - l);
          const int past = first_past + n * 8 + i % 2;  // columns beyond the first row's diagonal
          if (!is_whole && (kOfKeys ? past < m * 16 + i / 2 * 8
                                    : past >= visible || (a.causal && past > m * 16 + i / 2 * 8)))
            p[i] = 0;
          d[i] = p[i] * (dp[m][n][i] - delta);
        });
        unrolled<2>([&](int half) {
          ps[m][n * 2 + half] = pair_of<T>(p[half * 2], p[half * 2 + 1]);
          ds[m][n * 2 + half] = pair_of<T>(d[half * 2], d[half * 2 + 1]);
        });
      });
    });

    const int down = lane % 16 * kPitch + lane / 16 * 8;
    unrolled<kSteps>([&](int k) {
      std::uint32_t b[4];
      t.load_transposed(b, u + down + k * 16);
      unrolled<kTiles>([&](int m) {
        t.template multiply<T>(first[m][k * 2], ds[m], b[0], b[1]);
        t.template multiply<T>(first[m][k * 2 + 1], ds[m], b[2], b[3]);
      });
      if constexpr (kOfKeys) {
        t.load_transposed(b, w + down + k * 16);
        unrolled<kTiles>([&](int m) {
          t.template multiply<T>(second[m][k * 2], ps[m], b[0], b[1]);
          t.template multiply<T>(second[m][k * 2 + 1], ps[m], b[2], b[3]);
        });
      }
    });
  }

  TESSERA_DEVICE void store_rows(void* base, int row_heads, const Position& at, const Sums& sums,
                                 float factor) const {
    const auto to = head_of<T>(base, row_heads, at.batch, at.head, a.length, a.head_dim);
    unrolled<kTiles>([&](int m) {
      store_two_rows(a, to, at.row + m * 16 + at.lane / 4, 0, at.lane, sums[m], factor);
    });
  }

  TESSERA_DEVICE void operator()(Thread& t) const {
    if (t.block_y() >= tiles())
      walk<false>(t);
    else if (t.block() < a.kv_heads * a.batch)
      walk<true>(t);
  }

  // dk and dv where kOfKeys, else dq.
  template <bool kOfKeys>
  TESSERA_DEVICE void walk(Thread& t) const {
    const int group = a.heads / a.kv_heads;
    const Position at = position<kOfKeys>(t);

    T* const tiles = t.shared<T>();
    float* const stats = t.shared<float>(S::kTileBytes);
    Fragments x, y;
    bring<kRows>(t, tiles,
                 kOfKeys ? head(a.k, a.k_row, at, at.head) : head(a.q, a.q_row, at, at.head),
                 at.first);
    bring<kRows>(t, tiles + S::kStage,
                 kOfKeys ? head(a.v, a.v_row, at, at.head) : head(a.d_o, a.heads, at, at.head),
                 at.first);
    t.wait_copies();
    t.sync();
    keep(t, x, tiles);
    keep(t, y, tiles + S::kStage);
    t.sync();

    float of_rows[kTiles][2][2] = {};
    if constexpr (!kOfKeys)
      unrolled<kTiles * 2>([&](int i) {
        const std::int64_t row = (std::int64_t{at.batch} * a.heads + at.head) * statistics.length +
                                 at.row + at.lane / 4 + i * 8;
        of_rows[i / 2][i % 2][0] = statistics.lse[row];
        of_rows[i / 2][i % 2][1] = statistics.delta[row];
      });

    const Range columns = range<kOfKeys>(at);
    const int steps = kOfKeys ? columns.steps * group : columns.steps;
    const auto bring_columns = [&](int step) {
      const Position at = position<kOfKeys>(t);
      const Range columns = range<kOfKeys>(at);
      const int of = kOfKeys ? at.head * group + step / columns.steps : at.head / group;
      const int column = columns.begin + step % columns.steps * kColumns;
      T* const u = tiles + step % 2 * S::kStage;
      bring<kColumns>(t, u, kOfKeys ? head(a.q, a.q_row, at, of) : head(a.k, a.k_row, at, of),
                      column);
      bring<kColumns>(t, u + S::kStage / 2,
                      kOfKeys ? head(a.d_o, a.heads, at, of) : head(a.v, a.v_row, at, of), column);
      if (kOfKeys && t.index() < kColumns / 2) {
        const std::int64_t row =
            (std::int64_t{at.batch} * a.heads + of) * statistics.length + column;
        const int e = t.index() % (kColumns / 4) * 4;
        const float* from = t.index() < kColumns / 4 ? statistics.lse : statistics.delta;
        t.copy_async(stats + step % 2 * 2 * kColumns + t.index() * 4, from + row + e, true);
      }
    };

    Sums first = {}, second = {};
    bring_columns(0);
    for (int step = 0; step < steps; ++step) {
      t.wait_copies();
      t.sync();
      if (step + 1 < steps) bring_columns(step + 1);
      const T* const u = tiles + step % 2 * S::kStage;
      const int here = columns.begin + step % columns.steps * kColumns;
      TESSERA_UNROLL(1)
      for (int c = 0; c < kColumns; c += 16) {
        const int column = here + c;
        if (at.row >= a.length || column >= columns.end) break;
        if (a.causal && (kOfKeys ? column + 15 < at.row : column > at.row + kTiles * 16 - 1))
          continue;
        add<kOfKeys>(t, first, second, x, y, u + c * kPitch, u + S::kStage / 2 + c * kPitch,
                     stats + step % 2 * 2 * kColumns + c, of_rows, at, column);
      }
    }
    const Position end_at = position<kOfKeys>(t);
    if constexpr (kOfKeys) {
      store_rows(a.dk, a.dk_row, end_at, first, a.scale);
      store_rows(a.dv, a.dv_row, end_at, second, 1);
    } else {
      store_rows(a.dq, a.dq_row, end_at, first, a.scale);
    }
  }
};

template <class T, int kDim>
void launch_backward(const AttentionBackwardArgs& a, Exec& exec) {
  using S = Shape<kDim>;
  const std::int64_t tiles = blocks_for(a.length, kRows);
  const auto length = static_cast<int>(tiles * kRows);
  const std::int64_t rows = std::int64_t{length} * a.heads * a.batch;
  auto* const memory = static_cast<float*>(a.workspace);
  const AttentionStatistics statistics{memory, memory + rows, length};
  using D = Delta<T, kDim>;
  launch<D::kThreads>(exec, {rows / D::kRowsOfBlock}, 0, D{a, statistics});
  if (walk_by_warpgroups(a, statistics, exec)) return;
  launch<S::kThreads>(exec, {std::int64_t{a.heads} * a.batch, 2 * tiles}, S::kBytes,
                      Backward<T, kDim>{a, statistics});
}

}  // namespace

bool attention_backward_on_tensor_cores(const AttentionBackwardArgs& a, Exec& exec) {
  const auto at = [](const void* pointer) { return static_cast<const char*>(pointer); };
  constexpr std::int32_t kLongest = 65535 / 2 * kRows;  // of a grid in y
  if (!attention_suits_library(a.head_dim, a.dtype) || !a.workspace || a.length > kLongest ||
      !are_aligned(at(a.q), at(a.k), at(a.v), at(a.o), at(a.d_o), at(a.dq), at(a.dk), at(a.dv),
                   at(a.workspace)))
    return false;
  const auto of_type = [&](auto tag) {
    using T = decltype(tag);
    a.head_dim <= 64 ? launch_backward<T, 64>(a, exec) : launch_backward<T, 128>(a, exec);
  };
  a.dtype == DType::bf16 ? of_type(BFloat16{}) : of_type(Float16{});
  return true;
}

}  // namespace tessera::kernels::cuda
