// Attention in tiles of queries and keys, with fused multiply-adds: see
// kernels/cuda/attention_tiles.hpp. No T x T buffer exists, and sums have one order.
//
//   forward  a block is a tile of queries:  Q │ K0 P0 V0 │ K1 P1 V1 │ ...  -> o, lse
//   dq       a block is a tile of queries:  Q dO │ V0 K0 │ V1 K1 │ ...     -> dq
//   dk, dv   a block is a tile of keys:     K V │ Q0 dO0 Q0 │ ...          -> dk, dv
//
// A tile's masked keys count 0 times: a NaN or an infinity in their values still shows.
#include "kernels/attention.hpp"

#include "kernels/cuda/attention_tiles.hpp"
#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {

namespace {

using namespace attention_tiles;

template <class C, int kDim>
struct Forward {
  AttentionArgs a;
  Problem p;
  int tiles;

  TESSERA_DEVICE void operator()(Thread& t) const {
    using S = Tiling<C, kDim>;
    Tiles<C, kDim> x(t, p);
    C *q = t.shared<C>(), *kv = q + S::kTileSize, *scores = kv + S::kTileSize;
    const BlockTile at = tile_of(t, p.heads, tiles, S::kTile, p.causal);
    const int kv_head = at.head / (p.heads / p.kv_heads);
    x.load_tile(q, a.q, a.q_row, at.batch, at.head, at.first, C(a.scale));
    typename Tiles<C, kDim>::Out out;
    x.clear(out);
    C top[S::kPart], total[S::kPart];  // `total` of this thread's columns only
    for (int i = 0; i < S::kPart; ++i) top[i] = -INFINITY, total[i] = 0;
    const int last = p.causal ? at.first + 1 : p.length;
    for (int key = 0; key < last; key += S::kTile) {
      x.replace_tile(kv, a.k, a.k_row, at.batch, kv_head, key);
      typename Tiles<C, kDim>::Scores s;
      x.scores_of(s, q, kv);
      for (int i = 0; i < S::kPart; ++i) {
        C best = top[i];
        for (int j = 0; j < S::kPart; ++j) {
          const int k = key + x.column(j);
          if (k >= p.length || (p.causal && k > at.first + x.row(i))) s[i][j] = -INFINITY;
          best = s[i][j] > best ? s[i][j] : best;
        }
        best = x.over_row(best, [](C m, C n) { return m > n ? m : n; });
        const C shrink = exp_of(top[i] - best);
        top[i] = best;
        total[i] *= shrink;
        for (int j = 0; j < S::kPart; ++j) {
          s[i][j] = exp_of(s[i][j] - best);
          total[i] += s[i][j];
        }
        for (int c = 0; c < S::kGroups * S::kV; ++c) out[i][c] *= shrink;
      }
      x.share(scores, s);
      x.replace_tile(kv, a.v, a.v_row, at.batch, kv_head, key);
      x.add_product(out, scores, kv);
    }
    C* lse = x.lse_of(a.lse, at.batch, at.head) + at.first;
    for (int i = 0; i < S::kPart; ++i) {
      const C all = x.over_row(total[i], [](C m, C n) { return m + n; });
      const C factor = C(1) / all;
      for (C& o : out[i]) o *= factor;
      if (x.tx == 0 && at.first + x.row(i) < p.length) lse[x.row(i)] = top[i] + log_of(all);
    }
    x.store_rows(a.o, a.heads, at.batch, at.head, at.first, out);
  }
};

// dq = scale sum over keys of ds k, ds = p (do v - delta).
template <class C, int kDim>
struct BackwardQuery {
  AttentionBackwardArgs a;
  Problem p;
  int tiles;

  TESSERA_DEVICE void operator()(Thread& t) const {
    using S = Tiling<C, kDim>;
    Tiles<C, kDim> x(t, p);
    C *q = t.shared<C>(), *d_o = q + S::kTileSize, *kv = d_o + S::kTileSize;
    C *scores = kv + S::kTileSize, *delta = scores + S::kScoreSize;
    const BlockTile at = tile_of(t, p.heads, tiles, S::kTile, p.causal);
    const int kv_head = at.head / (p.heads / p.kv_heads);
    x.load_tile(q, a.q, a.q_row, at.batch, at.head, at.first, C(a.scale));
    x.load_tile(d_o, a.d_o, a.heads, at.batch, at.head, at.first);
    t.sync();
    x.deltas(delta, d_o, a.o, at.batch, at.head, at.first);
    const C* lse = x.lse_of(a.lse, at.batch, at.head) + at.first;
    typename Tiles<C, kDim>::Out out;
    x.clear(out);
    const int last = p.causal ? at.first + 1 : p.length;
    for (int key = 0; key < last; key += S::kTile) {
      typename Tiles<C, kDim>::Scores s, ds;
      x.replace_tile(kv, a.v, a.v_row, at.batch, kv_head, key);
      x.scores_of(ds, d_o, kv);
      x.replace_tile(kv, a.k, a.k_row, at.batch, kv_head, key);
      x.scores_of(s, q, kv);
      for (int i = 0; i < S::kPart; ++i)
        for (int j = 0; j < S::kPart; ++j) {
          const int r = x.row(i);
          ds[i][j] = x.sees(at.first + r, key + x.column(j))
                         ? exp_of(s[i][j] - lse[r]) * (ds[i][j] - delta[r])
                         : C(0);
        }
      x.share(scores, ds);
      t.sync();
      x.add_product(out, scores, kv);
    }
    for (auto& row : out)
      for (C& d : row) d *= C(a.scale);
    x.store_rows(a.dq, a.dq_row, at.batch, at.head, at.first, out);
  }
};

// dv = sum over queries of p do, dk = sum of ds scale q, over the group's heads in order.
template <class C, int kDim>
struct BackwardKey {
  AttentionBackwardArgs a;
  Problem p;
  int tiles;

  TESSERA_DEVICE void operator()(Thread& t) const {
    using S = Tiling<C, kDim>;
    Tiles<C, kDim> x(t, p);
    C *k = t.shared<C>(), *v = k + S::kTileSize, *other = v + S::kTileSize;
    C *scores = other + S::kTileSize, *delta = scores + S::kScoreSize;
    const BlockTile at = tile_of(t, p.kv_heads, tiles, S::kTile, false);
    x.load_tile(k, a.k, a.k_row, at.batch, at.head, at.first);
    x.load_tile(v, a.v, a.v_row, at.batch, at.head, at.first);
    typename Tiles<C, kDim>::Out dk, dv;
    x.clear(dk);
    x.clear(dv);
    const int group = p.heads / p.kv_heads;
    for (int head = at.head * group; head < (at.head + 1) * group; ++head) {
      const C* lse = x.lse_of(a.lse, at.batch, head);
      for (int query = p.causal ? at.first : 0; query < p.length; query += S::kTile) {
        typename Tiles<C, kDim>::Scores s, ds;  // rows are keys, columns queries
        x.replace_tile(other, a.q, a.q_row, at.batch, head, query, C(a.scale));
        x.scores_of(s, k, other);
        x.replace_tile(other, a.d_o, a.heads, at.batch, head, query);
        x.deltas(delta, other, a.o, at.batch, head, query);
        x.scores_of(ds, v, other);
        for (int i = 0; i < S::kPart; ++i)
          for (int j = 0; j < S::kPart; ++j) {
            const int r = query + x.column(j);
            s[i][j] = x.sees(r, at.first + x.row(i)) ? exp_of(s[i][j] - lse[r]) : C(0);
          }
        x.share(scores, s);
        t.sync();
        x.add_product(dv, scores, other);
        for (int i = 0; i < S::kPart; ++i)
          for (int j = 0; j < S::kPart; ++j) ds[i][j] = s[i][j] * (ds[i][j] - delta[x.column(j)]);
        t.sync();
        x.share(scores, ds);
        x.load_tile(other, a.q, a.q_row, at.batch, head, query, C(a.scale));
        t.sync();
        x.add_product(dk, scores, other);
      }
    }
    x.store_rows(a.dk, a.dk_row, at.batch, at.head, at.first, dk);
    x.store_rows(a.dv, a.dv_row, at.batch, at.head, at.first, dv);
  }
};

}  // namespace

void attention_in_tiles(const AttentionArgs& a, Exec& exec) {
  const Problem p = problem_of(a, static_cast<const char*>(a.o), static_cast<const char*>(a.q),
                               static_cast<const char*>(a.k), static_cast<const char*>(a.v));
  with_shape(a.dtype, a.head_dim, [&](auto c, auto dim) {
    using S = Tiling<decltype(c), dim()>;
    const std::int64_t tiles = blocks_for(a.length, S::kTile);
    launch<kThreads>(exec, {tiles * a.heads * a.batch}, S::bytes(2, 0),
                     Forward<decltype(c), dim()>{a, p, static_cast<int>(tiles)});
  });
}

void attention_backward_in_tiles(const AttentionBackwardArgs& a, Exec& exec) {
  const auto at = [](const void* pointer) { return static_cast<const char*>(pointer); };
  const Problem p =
      problem_of(a, at(a.dq), at(a.dk), at(a.dv), at(a.q), at(a.k), at(a.v), at(a.o), at(a.d_o));
  with_shape(a.dtype, a.head_dim, [&](auto c, auto dim) {
    using S = Tiling<decltype(c), dim()>;
    const std::int64_t tiles = blocks_for(a.length, S::kTile);
    launch<kThreads>(exec, {tiles * a.heads * a.batch}, S::bytes(3, 1),
                     BackwardQuery<decltype(c), dim()>{a, p, static_cast<int>(tiles)});
    launch<kThreads>(exec, {tiles * a.kv_heads * a.batch}, S::bytes(3, 1),
                     BackwardKey<decltype(c), dim()>{a, p, static_cast<int>(tiles)});
  });
}

}  // namespace tessera::kernels::cuda
