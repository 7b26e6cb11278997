// Attention's backward pass by products of warpgroups, for sm_90: the walks of
// attention_backward.cu. Here a block is one warpgroup with 64 rows, and 64 columns come a step.
//
//   s = x u^T    p = exp(scale s - lse)    dp = y w^T    ds = p (dp - delta)
//   first += ds u (dk or dq)               second += p w (dv)
//
// A product is queued, and waited for where its sums are read. Heads of up to 64 leave registers
// for the scores of the step to come; of wider ones s and dp are queued in turn, and all is there
// at the step's end.
//
//   products   dp, next s | second, as p is there | first, as ds is there
//   threads    p of this s          ds                      the next step
#include <cstdint>
#include <numbers>

#include "kernels/cuda/attention_backward.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {

namespace {

using attention_tiles::Head;
using attention_tiles::head_of;

constexpr int kSide = 64;      // rows of a block, columns of a step
constexpr int kThreads = 128;  // a warpgroup

template <class T, int kDim>
struct Backward {
  AttentionBackwardArgs a;
  AttentionStatistics statistics;
  int together;  // heads, of all elements of the batch

  static constexpr int kBlocks = 2;
  static constexpr bool kAhead = kDim == 64;
  static constexpr int kHalves = kDim / 64, kTile = kSide * kDim, kStages = kAhead ? 4 : 2;
  static constexpr std::size_t kTileBytes = 2 * kTile * (2 + 2 * kStages);
  static constexpr std::size_t kBytes = kTileBytes + sizeof(float) * kStages * 2 * kSide;

  using Scores = float[8][4];
  using Sums = float[kHalves][8][4];

  struct Position {
    int batch, head, row;  // the block's first row
  };

  // A block's walk: of keys, then of queries; all tiles of `together` heads, so that what they read
  // lies in the L2 cache, then of the next; of these the longest first.
  TESSERA_DEVICE void operator()(Thread& t) const {
#ifdef TESSERA_HAS_WARPGROUPS
    const int tiles = (a.length - 1) / kSide + 1, of_keys = a.batch * a.kv_heads * tiles;
    const int block = static_cast<int>(t.block());
    if (block < of_keys) {
      const Position at = position(block, a.kv_heads, tiles);
      walk<true>(t, at);
    } else {
      Position at = position(block - of_keys, a.heads, tiles);
      at.row = (tiles - 1) * kSide - at.row;
      walk<false>(t, at);
    }
#else  // not the code for sm_90: what has_warpgroup_products() has seen was another image
    __trap();
#endif
  }
  TESSERA_DEVICE Position position(int block, int heads, int tiles) const {
    const int layer = block / (together * tiles), here = block % (together * tiles);
    const int rest = a.batch * heads - layer * together, width = rest < together ? rest : together;
    const int unit = layer * together + here % width;
    return {unit / heads, unit % heads, here / width * kSide};
  }

  TESSERA_DEVICE Head<const T> head(const void* base, int row_heads, const Position& at,
                                    int head) const {
    return head_of<const T>(base, row_heads, at.batch, head, a.length, a.head_dim);
  }

  // A tile's rows from `first` on, as blocks of 64 columns; zeros beyond the last row and column.
  TESSERA_DEVICE void bring(Thread& t, T* tile, const Head<const T>& from, int first) const {
    constexpr int across = kDim / 8, per_pass = kThreads / across;
    static_assert(per_pass % 8 == 0, "a row's pieces change places alike in each pass");
    const int r = t.index() / across, d = t.index() % across * 8;
    const T* row = from.data + (first + r) * from.stride + d;
    const std::int64_t pass = per_pass * from.stride;
    const bool inside = d < a.head_dim;
    T* to = swizzled(tile + d / 64 * kSide * 64 + r * 64 + d % 64);
    for (int i = 0; i < kSide; i += per_pass, row += pass, to += per_pass * 64)
      t.copy_async(to, row, inside && first + r + i < a.length);
  }

  // Scores of 16 columns from 16 k on as what a product takes.
  TESSERA_DEVICE static void fragment(std::uint32_t (&out)[4], const Scores& s, int k) {
    unrolled<4>([&](int i) {
      const float(&of)[4] = s[k * 2 + i / 2];
      out[i] = pair_of<T>(of[i % 2 * 2], of[i % 2 * 2 + 1]);
    });
  }
  // out = rows (tile)^T
  TESSERA_DEVICE static void score(Thread& t, Scores& out, Thread::Matrix rows,
                                   Thread::Matrix tile) {
    unrolled<kDim / 16>([&](int k) {
      const int at = k / 4 * kSide * 64 + k % 4 * 16;
      t.template multiply_columns<T>(out, rows + at, tile + at, k > 0);
    });
  }
  // sums += scores tile
  TESSERA_DEVICE static void add(Thread& t, Sums& sums, const Scores& scores, Thread::Matrix tile) {
    std::uint32_t rounded[4][4];
    unrolled<4>([&](int k) { fragment(rounded[k], scores, k); });
    t.fence_products();
    unrolled<4>([&](int k) {
      unrolled<kHalves>([&](int half) {
        t.template multiply_rows<T>(sums[half], rounded[k], tile + (half * kSide + k * 16) * 64);
      });
    });
    t.commit_products();
  }

  TESSERA_DEVICE void store_rows(Thread& t, void* base, int row_heads, const Position& at,
                                 const Sums& sums, float factor) const {
    const auto to = head_of<T>(base, row_heads, at.batch, at.head, a.length, a.head_dim);
    const int row = at.row + t.warp() * 16 + t.lane() / 4;
    unrolled<kHalves>(
        [&](int half) { store_two_rows(a, to, row, half * 64, t.lane(), sums[half], factor); });
  }

  // dk and dv where kOfKeys, else dq.
  template <bool kOfKeys>
  TESSERA_DEVICE void walk(Thread& t, const Position& at) const {
    T *const kept = t.shared<T>(), *const stages = kept + 2 * kTile;
    float* const stats = t.shared<float>(kTileBytes);

    // Columns [begin, end), of each head that reads these keys.
    const int group = a.heads / a.kv_heads, begin = kOfKeys && a.causal ? at.row : 0;
    const int last = !kOfKeys && a.causal ? at.row + kSide : a.length;
    const int end = last < a.length ? last : a.length;
    const int steps = ((end - begin - 1) / kSide + 1) * (kOfKeys ? group : 1);
    int next_head = kOfKeys ? at.head * group : at.head / group, next = begin;
    const auto bring_next = [&](int step) {
      const int stage = step % kStages;
      T* const u = stages + stage * 2 * kTile;
      bring(t, u, kOfKeys ? head(a.q, a.q_row, at, next_head) : head(a.k, a.k_row, at, next_head),
            next);
      bring(t, u + kTile,
            kOfKeys ? head(a.d_o, a.heads, at, next_head) : head(a.v, a.v_row, at, next_head),
            next);
      if (kOfKeys && t.index() < kSide / 2) {
        const int e = t.index() % (kSide / 4) * 4;
        const float* from = t.index() < kSide / 4 ? statistics.lse : statistics.delta;
        t.copy_async(
            stats + stage * 2 * kSide + t.index() * 4,
            from + (std::int64_t{at.batch} * a.heads + next_head) * statistics.length + next + e,
            true);
      }
      next += kSide;
      if (next >= end) {
        next = begin;
        ++next_head;
      }
    };
    bring(t, kept, kOfKeys ? head(a.k, a.k_row, at, at.head) : head(a.q, a.q_row, at, at.head),
          at.row);
    bring(t, kept + kTile,
          kOfKeys ? head(a.v, a.v_row, at, at.head) : head(a.d_o, a.heads, at, at.head), at.row);
    bring_next(0);
    if (kAhead && steps > 1) bring_next(1);

    const int row = at.row + t.warp() * 16 + t.lane() / 4, pair = t.lane() % 4 * 2;
    float of_rows[2][2] = {};
    if constexpr (!kOfKeys)
      unrolled<2>([&](int i) {
        const std::int64_t of =
            (std::int64_t{at.batch} * a.heads + at.head) * statistics.length + row + i * 8;
        of_rows[i][0] = statistics.lse[of];
        of_rows[i][1] = statistics.delta[of];
      });

    const Thread::Matrix x = t.matrix(kept), y = x + kTile, first_stage = y + kTile;
    const auto u_of = [&](int step) { return first_stage + step % kStages * 2 * kTile; };
    const float factor = a.scale * std::numbers::log2e_v<float>;
    Sums first = {}, second = {};
    int column = begin;
    const auto one_step = [&](int step, Scores& s, Scores& ahead) {
      t.wait_copies_for_products();
      t.sync();
      const Thread::Matrix u = u_of(step), w = u + kTile;
      const float* const lse = stats + step % kStages * 2 * kSide + pair;
      Scores dp;
      if constexpr (kAhead) {
        if (step + 2 < steps) bring_next(step + 2);
        t.fence_products();
        score(t, dp, y, w);
        score(t, ahead, x, u_of(step + 1));  // of the last one whatever lies there: nobody reads it
        t.commit_products();
      } else {
        t.fence_products();
        score(t, s, x, u);
        t.commit_products();
        score(t, dp, y, w);
        t.commit_products();
        if (step + 1 < steps) bring_next(step + 1);
        t.template wait_products<1>(s);
      }

      unrolled<8>([&](int n) {
        Pack<float, 2> of_columns{};
        if constexpr (kOfKeys) of_columns = load<2>(lse + n * 8);
        unrolled<4>([&](int i) {
          const float l = kOfKeys ? of_columns.at[i % 2] : of_rows[i / 2][0];
          s[n][i] = exp2_fast(s[n][i] * factor - l);
        });
      });
      const bool is_whole =
          (!a.causal || column != at.row) && (kOfKeys || column + kSide <= a.length);
      if (!is_whole) {
        const int first_past = column + pair - row, visible = a.length - row;
        unrolled<8>([&](int n) {
          unrolled<4>([&](int i) {
            const int past = first_past + n * 8 + i % 2;  // beyond the first row's diagonal
            const bool is_hidden =
                kOfKeys ? past < i / 2 * 8 : (past >= visible || (a.causal && past > i / 2 * 8));
            if (is_hidden) s[n][i] = 0;
          });
        });
      }
      column = column + kSide < end ? column + kSide : begin;
      if constexpr (kAhead) t.template wait_products<1>(first, second);
      if constexpr (kOfKeys) add(t, second, s, w);
      t.template wait_products<kOfKeys ? 1 : 0>(dp, ahead);
      unrolled<8>([&](int n) {
        Pack<float, 2> of_columns{};
        if constexpr (kOfKeys) of_columns = load<2>(lse + kSide + n * 8);
        unrolled<4>([&](int i) {
          const float delta = kOfKeys ? of_columns.at[i % 2] : of_rows[i / 2][1];
          dp[n][i] = s[n][i] * (dp[n][i] - delta);
        });
      });
      add(t, first, dp, u);
      if constexpr (!kAhead) t.template wait_products<0>(first, second);
    };

    if constexpr (kAhead) {
      Scores even, odd;
      t.wait_copies_for_products();
      t.sync();
      t.fence_products();
      score(t, even, x, u_of(0));
      t.commit_products();
      t.template wait_products<0>(even);
      for (int step = 0; step < steps; ++step) {
        one_step(step, even, odd);
        if (++step < steps) one_step(step, odd, even);
      }
      t.template wait_products<0>(first, second);
    } else {
      Scores s;
      for (int step = 0; step < steps; ++step) one_step(step, s, s);
    }
    if constexpr (kOfKeys) {
      store_rows(t, a.dk, a.dk_row, at, first, a.scale);
      store_rows(t, a.dv, a.dv_row, at, second, 1);
    } else {
      store_rows(t, a.dq, a.dq_row, at, first, a.scale);
    }
  }
};

template <class T, int kDim>
void launch_walks(const AttentionBackwardArgs& a, const AttentionStatistics& statistics,
                  Exec& exec) {
  using B = Backward<T, kDim>;
  const std::int64_t tiles = blocks_for(a.length, kSide);
  // Two blocks for each that the GPU runs at a time.
  const auto together =
      static_cast<int>(blocks_for(std::int64_t{2} * B::kBlocks * multiprocessors(), tiles));
  launch<kThreads>(exec, {tiles * a.batch * (a.heads + a.kv_heads)}, B::kBytes,
                   B{a, statistics, together});
}

}  // namespace

bool walk_by_warpgroups(const AttentionBackwardArgs& a, const AttentionStatistics& statistics,
                        Exec& exec) {
  if (!has_warpgroup_products()) return false;
  const auto of_type = [&](auto tag) {
    using T = decltype(tag);
    a.head_dim <= 64 ? launch_walks<T, 64>(a, statistics, exec)
                     : launch_walks<T, 128>(a, statistics, exec);
  };
  a.dtype == DType::bf16 ? of_type(BFloat16{}) : of_type(Float16{});
  return true;
}

}  // namespace tessera::kernels::cuda
