// Tiles of 64 queries by 64 keys. Forward, a task is a tile of queries of one head; it holds scores
// transposed (keys by queries), so that the softmax runs along vectors without horizontal sums.
// Backward, a task is one key-value head: it walks the key tiles, adds dk and dv up over the
// group's heads and query tiles in a fixed order, and adds dq in place.
#include "kernels/attention.hpp"

#include <cmath>
#include <cstring>

#include "kernels/host/cpu.hpp"
#include "kernels/host/rows.hpp"
#include "kernels/host/scratch.hpp"
#include "kernels/host/tile.hpp"
#include "tessera/device/workers.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

constexpr std::int64_t kTile = 64;

template <class C>
using Block = C[kTile * kAttentionMaxHeadDim];  // [64, D] or [D, 64]

// One head of one batch element of q, k, v, o or their gradients: rows of D elements.
template <class T>
struct Head {
  T* data;
  std::int64_t stride;

  static Head of(const void* base, std::int64_t row, std::int64_t b, std::int64_t head,
                 std::int64_t length, std::int64_t dim) {
    T* at = static_cast<T*>(const_cast<void*>(base));
    return {at + (b * length * row + head) * dim, row * dim};
  }
  T* row(std::int64_t t) const { return data + t * stride; }
};

template <class C>
constexpr std::int64_t padded(std::int64_t dim) {
  return (dim + kTileStep<C> - 1) / kTileStep<C> * kTileStep<C>;
}

// Rows [first, first + rows) as [rows, padded(D)], times `factor`; the padding is zero.
template <class T>
void copy_tile(Compute<T>* out, Head<T> head, std::int64_t first, std::int64_t rows,
               std::int64_t dim, Compute<T> factor = 1) {
  using C = Compute<T>;
  const std::int64_t ld = padded<C>(dim);
  const Vec<C> scale(factor);
  for (std::int64_t i = 0; i < rows; ++i) {
    map(out + i * ld, dim, [scale](Vec<C> x) { return x * scale; }, head.row(first + i));
    std::fill(out + i * ld + dim, out + (i + 1) * ld, C(0));
  }
}

// The same tile as a product's right side: where it lies if it can be read there, else a copy.
template <class T>
TileB<Compute<T>> tile_of(Compute<T>* scratch, Head<T> head, std::int64_t first, std::int64_t rows,
                          std::int64_t dim) {
  using C = Compute<T>;
  if constexpr (std::is_same_v<T, C>)
    if (dim % kTileStep<C> == 0) return {head.row(first), head.stride};
  copy_tile<T>(scratch, head, first, rows, dim);
  return {scratch, padded<C>(dim)};
}
template <class C>
TileA<C> left(TileB<C> tile) {
  return {tile.data, tile.ld, 1};
}

// The transposed tile [D, 64], times `factor`; missing rows are zero.
template <class T>
void transpose_tile(Compute<T>* out, Head<T> head, std::int64_t first, std::int64_t rows,
                    std::int64_t dim, Compute<T> factor = 1) {
  using C = Compute<T>;
  for (std::int64_t i = 0; i < rows; ++i) {
    const T* from = head.row(first + i);
    for (std::int64_t d = 0; d < dim; ++d) out[d * kTile + i] = static_cast<C>(from[d]) * factor;
  }
  for (std::int64_t d = 0; rows < kTile && d < dim; ++d)
    std::fill(out + d * kTile + rows, out + (d + 1) * kTile, C(0));
}

// Running maximum and denominator of each query's softmax.
template <class C>
struct Softmax {
  alignas(64) C top[kTile], total[kTile], shrink[kTile];

  Softmax() {
    std::fill_n(top, kTile, -std::numeric_limits<C>::infinity());
    std::fill_n(total, kTile, C(0));
  }

  // scores [keys, 64] become exp(score - top); `shrink` is what earlier sums must be multiplied by.
  void update(C* scores, std::int64_t keys) {
    for (std::int64_t i = 0; i < kTile; i += kLanes<C>) {
      const Vec<C> before = load(top + i);
      Vec<C> best = before, sum(C(0));
      for (std::int64_t j = 0; j < keys; ++j) best = max(best, load(scores + j * kTile + i));
      for (std::int64_t j = 0; j < keys; ++j) {
        const Vec<C> p = exp(load(scores + j * kTile + i) - best);
        store(scores + j * kTile + i, p);
        sum += p;
      }
      const Vec<C> factor = exp(before - best);
      store(top + i, best);
      store(shrink + i, factor);
      store(total + i, fma(load(total + i), factor, sum));
    }
  }
};

template <class C>
struct ForwardTiles {
  alignas(64) Block<C> q_t, k_block, v_block, sums;
  alignas(64) C scores[kTile * kTile];
};

template <class T>
void forward_task(const AttentionArgs& a, std::int64_t b, std::int64_t h, std::int64_t first) {
  using C = Compute<T>;
  auto& [q_t, k_block, v_block, sums, scores] = in_scratch<ForwardTiles<C>>();
  const std::int64_t dim = a.head_dim, ld = padded<C>(dim), length = a.length;
  const std::int64_t queries = std::min(kTile, length - first), kv = h / (a.heads / a.kv_heads);
  const auto k = Head<T>::of(a.k, a.k_row, b, kv, length, dim);
  const auto v = Head<T>::of(a.v, a.v_row, b, kv, length, dim);
  transpose_tile<T>(q_t, Head<T>::of(a.q, a.q_row, b, h, length, dim), first, queries, dim,
                    C(a.scale));
  Softmax<C> softmax;
  const std::int64_t last = a.causal ? first + 1 : length;
  for (std::int64_t key = 0; key < last; key += kTile) {
    const std::int64_t keys = std::min(kTile, length - key);
    const bool diagonal = a.causal && key == first;
    tile_product<C>(scores, kTile, left(tile_of<T>(k_block, k, key, keys, dim)), {q_t, kTile}, keys,
                    kTile, dim, false, diagonal ? Corner::columns_from : Corner::none);
    for (std::int64_t j = 1; diagonal && j < keys; ++j)
      std::fill_n(scores + j * kTile, j, -std::numeric_limits<C>::infinity());
    softmax.update(scores, keys);
    for (std::int64_t i = 0; key > 0 && i < queries; ++i) {
      const Vec<C> shrink(softmax.shrink[i]);
      map(sums + i * ld, ld, [shrink](Vec<C> x) { return x * shrink; }, sums + i * ld);
    }
    tile_product<C>(sums, ld, {scores, 1, kTile}, tile_of<T>(v_block, v, key, keys, dim), queries,
                    ld, keys, key > 0, diagonal ? Corner::depth_to : Corner::none);
  }
  const auto o = Head<T>::of(a.o, a.heads, b, h, length, dim);
  C* lse = static_cast<C*>(a.lse) + (b * a.heads + h) * length + first;
  for (std::int64_t i = 0; i < queries; ++i) {
    const Vec<C> factor(C(1) / softmax.total[i]);
    map(o.row(first + i), dim, [factor](Vec<C> x) { return x * factor; }, sums + i * ld);
    lse[i] = softmax.top[i] + std::log(softmax.total[i]);
  }
}

// The backward pass of one key-value head of one batch element. Lies in the scratch as a whole.
template <class T>
class Backward {
  using C = Compute<T>;

 public:
  Backward(const AttentionBackwardArgs& args, std::int64_t b, std::int64_t kv)
      : a(args),
        b_(b),
        kv_(kv),
        dim(args.head_dim),
        ld(padded<C>(args.head_dim)),
        length(args.length),
        group(args.heads / args.kv_heads),
        k(Head<T>::of(args.k, args.k_row, b, kv, length, dim)),
        v(Head<T>::of(args.v, args.v_row, b, kv, length, dim)) {}

  void run() {
    for (std::int64_t key = 0; key < length; key += kTile) keys_tile(key);
    if constexpr (!kInPlace) {
      for (std::int64_t h = kv_ * group; h < (kv_ + 1) * group; ++h)
        for (std::int64_t query = 0; query < length; query += kTile) queries_tile(h, query);
    }
  }

 private:
  // 16-bit dq would be rounded at every addition, so it is summed in a second walk, query tile by
  // query tile.
  static constexpr bool kInPlace = std::is_same_v<T, C>;

  void load_keys(std::int64_t key) {
    key_ = key;
    keys_ = std::min(kTile, length - key);
    transpose_tile<T>(k_t, k, key, keys_, dim);
    transpose_tile<T>(v_t, v, key, keys_, dim);
    k_tile = tile_of<T>(k_block, k, key, keys_, dim);
  }

  void load_queries(std::int64_t h, std::int64_t query) {
    query_ = query;
    queries_ = std::min(kTile, length - query);
    const auto d_o = Head<T>::of(a.d_o, a.heads, b_, h, length, dim);
    const auto o = Head<T>::of(a.o, a.heads, b_, h, length, dim);
    copy_tile<T>(q_block, Head<T>::of(a.q, a.q_row, b_, h, length, dim), query, queries_, dim,
                 C(a.scale));
    do_tile = tile_of<T>(do_block, d_o, query, queries_, dim);
    for (std::int64_t i = 0; i < queries_; ++i)
      delta[i] = dot_of(d_o.row(query + i), o.row(query + i), dim);
    lse = static_cast<const C*>(a.lse) + (b_ * a.heads + h) * length + query;
  }

  bool diagonal() const { return a.causal && key_ == query_; }

  // p = exp(q k - lse) and ds = p (do v - delta), both [queries, 64], zero above the diagonal.
  void scores() {
    const Corner corner = diagonal() ? Corner::columns_to : Corner::none;
    tile_product<C>(p, kTile, {q_block, ld, 1}, {k_t, kTile}, queries_, kTile, dim, false, corner);
    tile_product<C>(ds, kTile, left(do_tile), {v_t, kTile}, queries_, kTile, dim, false, corner);
    for (std::int64_t i = 0; i < queries_; ++i) {
      const std::int64_t valid = diagonal() ? i + 1 : kTile;
      const Vec<C> shift(lse[i]), center(delta[i]);
      for (std::int64_t j = i * kTile; j < i * kTile + valid; j += kLanes<C>) {
        const Vec<C> weight = exp(load(p + j) - shift);
        store(p + j, weight);
        store(ds + j, weight * (load(ds + j) - center));
      }
      std::fill(p + i * kTile + valid, p + (i + 1) * kTile, C(0));
      std::fill(ds + i * kTile + valid, ds + (i + 1) * kTile, C(0));
    }
  }

  void keys_tile(std::int64_t key) {
    load_keys(key);
    std::fill_n(dk_block, keys_ * ld, C(0));
    std::fill_n(dv_block, keys_ * ld, C(0));
    for (std::int64_t h = kv_ * group; h < (kv_ + 1) * group; ++h) {
      for (std::int64_t query = a.causal ? key : 0; query < length; query += kTile) {
        load_queries(h, query);
        scores();
        const Corner corner = diagonal() ? Corner::depth_from : Corner::none;
        tile_product<C>(dv_block, ld, {p, 1, kTile}, do_tile, keys_, ld, queries_, true, corner);
        tile_product<C>(dk_block, ld, {ds, 1, kTile}, {q_block, ld}, keys_, ld, queries_, true,
                        corner);
        if constexpr (kInPlace) {
          add_dq(false);
          store_dq(h, key > 0);
        }
      }
    }
    write(Head<T>::of(a.dk, a.dk_row, b_, kv_, length, dim), dk_block, key, keys_, C(1), false);
    write(Head<T>::of(a.dv, a.dv_row, b_, kv_, length, dim), dv_block, key, keys_, C(1), false);
  }

  void queries_tile(std::int64_t h, std::int64_t query) {
    load_queries(h, query);
    const std::int64_t last = a.causal ? query + 1 : length;
    for (std::int64_t key = 0; key < last; key += kTile) {
      load_keys(key);
      scores();
      add_dq(key > 0);
    }
    store_dq(h, false);
  }

  void add_dq(bool accumulate) {
    tile_product<C>(dq_block, ld, {ds, kTile, 1}, k_tile, queries_, ld, keys_, accumulate,
                    diagonal() ? Corner::depth_to : Corner::none);
  }
  void store_dq(std::int64_t h, bool accumulate) {
    write(Head<T>::of(a.dq, a.dq_row, b_, h, length, dim), dq_block, query_, queries_, C(a.scale),
          accumulate);
  }

  // out = factor * block + (accumulate ? out : 0)
  void write(Head<T> out, const C* block, std::int64_t first, std::int64_t rows, C factor,
             bool accumulate) const {
    const Vec<C> scale(factor);
    for (std::int64_t i = 0; i < rows; ++i) {
      T* row = out.row(first + i);
      if (accumulate)
        map(
            row, dim, [scale](Vec<C> x, Vec<C> old) { return fma(scale, x, old); }, block + i * ld,
            row);
      else
        map(row, dim, [scale](Vec<C> x) { return scale * x; }, block + i * ld);
    }
  }

  const AttentionBackwardArgs& a;
  std::int64_t b_, kv_, dim, ld, length, group;
  Head<T> k, v;
  std::int64_t key_ = 0, keys_ = 0, query_ = 0, queries_ = 0;
  TileB<C> k_tile{}, do_tile{};
  const C* lse = nullptr;
  alignas(64) C delta[kTile], p[kTile * kTile], ds[kTile * kTile];
  alignas(64) Block<C> k_t, v_t, k_block, q_block, do_block, dk_block, dv_block, dq_block;
};

}  // namespace

void attention(const AttentionArgs& a, Exec& exec) {
  const std::int64_t tiles = (a.length + kTile - 1) / kTile;
  visit_floating(a.dtype, [&](auto tag) {
    parallel_for(exec, a.batch * a.heads * tiles, [&](std::int64_t task) {
      forward_task<typename decltype(tag)::type>(a, task / tiles / a.heads, task / tiles % a.heads,
                                                 task % tiles * kTile);
    });
  });
}

void attention_backward(const AttentionBackwardArgs& a, Exec& exec) {
  visit_floating(a.dtype, [&](auto tag) {
    parallel_for(exec, std::int64_t{a.batch} * a.kv_heads, [&](std::int64_t task) {
      in_scratch<Backward<typename decltype(tag)::type>>(a, task / a.kv_heads, task % a.kv_heads)
          .run();
    });
  });
}

}  // namespace tessera::kernels::cpu
