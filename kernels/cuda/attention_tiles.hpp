// Tiles of attention: what its passes over queries and keys share. A block of 16 x 16 threads forms
// kTile x kTile scores, each thread a square of them, and keeps its part of the outputs in
// registers. Shared memory holds tiles in the computing type, padded so that 16-byte reads of 8
// neighbouring rows meet no bank twice.
#pragma once

#include <cmath>

#include "kernels/attention.hpp"
#include "kernels/cuda/vector.hpp"

namespace tessera::kernels::cuda::attention_tiles {

inline constexpr int kThreads = 256;
inline constexpr int kSide = 16;  // threads along each side of a tile

// How one element type is tiled for heads of up to kDim elements.
template <class C, int kDim>
struct Tiling {
  // So that a block's shared memory fits into the 163 KiB of an A100, also backward.
  static constexpr int kTile = sizeof(C) == 8 ? 16 : kDim > 128 ? 32 : 64;
  static constexpr int kPart = kTile / kSide;  // rows, and columns of scores, of a thread
  static constexpr int kV = 16 / static_cast<int>(sizeof(C));
  static constexpr int kGroups = kDim / (kSide * kV);  // of kV columns of an output, of a thread
  static constexpr int kLd = kDim + kV, kScoreLd = kTile + kV;
  static constexpr int kTileSize = kTile * kLd, kScoreSize = kTile * kScoreLd;
  static constexpr std::size_t bytes(int tiles, int rows) {
    return sizeof(C) * static_cast<std::size_t>(tiles * kTileSize + kScoreSize + rows * kTile);
  }
};

TESSERA_DEVICE float exp_of(float x) { return expf(x); }
TESSERA_DEVICE double exp_of(double x) { return exp(x); }
TESSERA_DEVICE float log_of(float x) { return logf(x); }
TESSERA_DEVICE double log_of(double x) { return log(x); }

// One head of one batch element: rows of D elements, `stride` apart.
template <class T>
struct Head {
  T* data;
  std::int64_t stride;
};
template <class T>
TESSERA_DEVICE Head<T> head_of(const void* base, int row, std::int64_t b, int head, int length,
                               int dim) {
  T* at = static_cast<T*>(const_cast<void*>(base));
  return {at + (b * length * row + head) * dim, std::int64_t{row} * dim};
}

// What every pass knows.
struct Problem {
  std::int32_t length;
  std::uint16_t heads, kv_heads, dim;
  float scale;
  DType dtype;
  bool causal;
  bool by_packs;  // rows can be read and written 16 bytes at a time
};

// Calls f with a value of the element type; f64 alone is computed in f64.
template <class C, class F>
TESSERA_DEVICE void with_type(DType dtype, F f) {
  if constexpr (sizeof(C) == 8) {
    f(double{});
  } else {
    if (dtype == DType::f32) f(float{});
    if (dtype == DType::bf16) f(BFloat16{});
    if (dtype == DType::f16) f(Float16{});
  }
}

template <class C, int kDim>
class Tiles : public Tiling<C, kDim> {
  using S = Tiling<C, kDim>;

 public:
  using S::kGroups, S::kLd, S::kPart, S::kScoreLd, S::kTile, S::kV;
  using Scores = C[kPart][kPart];      // rows ty kPart + i, columns tx + 16 j
  using Out = C[kPart][kGroups * kV];  // rows ty kPart + i, columns (tx + 16 g) kV + e

  TESSERA_DEVICE Tiles(Thread& thread, const Problem& problem)
      : t(thread), p(problem), tx(thread.index() % kSide), ty(thread.index() / kSide) {}

  TESSERA_DEVICE int row(int i) const { return ty * kPart + i; }
  TESSERA_DEVICE int column(int j) const { return tx + kSide * j; }

  // Rows [first, first + kTile) of a head, times `factor`, into a shared tile; 0 beyond the last.
  TESSERA_DEVICE void load_tile(C* tile, const void* base, int row_heads, std::int64_t b, int head,
                                int first, C factor = 1) {
    const int rows = p.length - first;
    with_type<C>(p.dtype, [&](auto tag) {
      using T = decltype(tag);
      const auto from = head_of<const T>(base, row_heads, b, head, p.length, p.dim);
      constexpr int n = kPack<T>, across = kDim / n;
      for (int e = t.index(); e < kTile * across; e += kThreads) {
        const int r = e / across, d = e % across * n;
        C* to = tile + r * kLd + d;
        if (p.by_packs && r < rows && d < p.dim) {
          const auto pack = load<n>(from.data + (first + r) * from.stride + d);
          for (int i = 0; i < n; ++i) to[i] = factor * load_as_compute(pack.at[i]);
        } else {
          for (int i = 0; i < n; ++i)
            to[i] = r < rows && d + i < p.dim
                        ? factor * load_as_compute(from.data[(first + r) * from.stride + d + i])
                        : C(0);
        }
      }
    });
  }

  // The same over a tile that the block has read: all threads wait before it and after it.
  TESSERA_DEVICE void replace_tile(C* tile, const void* base, int row_heads, std::int64_t b,
                                   int head, int first, C factor = 1) {
    t.sync();
    load_tile(tile, base, row_heads, b, head, first, factor);
    t.sync();
  }

  // out = a b^T of two tiles.
  TESSERA_DEVICE void scores_of(Scores& out, const C* a, const C* b) const {
    for (int i = 0; i < kPart; ++i)
      for (int j = 0; j < kPart; ++j) out[i][j] = 0;
    TESSERA_UNROLL((sizeof(C) == 8 ? 2 : 1))
    for (int d = 0; d < kDim; d += kV) {
      Pack<C, kV> x[kPart];
      for (int i = 0; i < kPart; ++i) x[i] = load<kV>(a + row(i) * kLd + d);
      for (int j = 0; j < kPart; ++j) {
        const auto y = load<kV>(b + column(j) * kLd + d);
        for (int i = 0; i < kPart; ++i)
          for (int e = 0; e < kV; ++e) out[i][j] += x[i].at[e] * y.at[e];
      }
    }
  }

  // out += a b of shared scores and a tile.
  TESSERA_DEVICE void add_product(Out& out, const C* a, const C* b) const {
    TESSERA_UNROLL(1)
    for (int k = 0; k < kTile; k += kV) {
      Pack<C, kV> x[kPart];
      for (int i = 0; i < kPart; ++i) x[i] = load<kV>(a + row(i) * kScoreLd + k);
      for (int e = 0; e < kV; ++e)
        for (int g = 0; g < kGroups; ++g) {
          const auto y = load<kV>(b + (k + e) * kLd + (tx + kSide * g) * kV);
          for (int i = 0; i < kPart; ++i)
            for (int f = 0; f < kV; ++f) out[i][g * kV + f] += x[i].at[e] * y.at[f];
        }
    }
  }

  TESSERA_DEVICE void clear(Out& out) const {
    for (int i = 0; i < kPart; ++i)
      for (int c = 0; c < kGroups * kV; ++c) out[i][c] = 0;
  }
  TESSERA_DEVICE void share(C* to, const Scores& scores) const {
    for (int i = 0; i < kPart; ++i)
      for (int j = 0; j < kPart; ++j) to[row(i) * kScoreLd + column(j)] = scores[i][j];
  }

  // A head's of [batch, heads, length].
  TESSERA_DEVICE C* lse_of(const void* lse, std::int64_t b, int head) const {
    return static_cast<C*>(const_cast<void*>(lse)) + (b * p.heads + head) * p.length;
  }

  // Rows from `first` on of a head = out, rounded once.
  TESSERA_DEVICE void store_rows(void* base, int row_heads, std::int64_t b, int head, int first,
                                 const Out& out) const {
    with_type<C>(p.dtype, [&](auto tag) {
      using T = decltype(tag);
      const auto to = head_of<T>(base, row_heads, b, head, p.length, p.dim);
      for (int i = 0; i < kPart; ++i) {
        if (first + row(i) >= p.length) continue;
        T* line = to.data + (first + row(i)) * to.stride;
        for (int g = 0; g < kGroups; ++g) {
          const int d = (tx + kSide * g) * kV;
          Pack<T, kV> pack;
          for (int f = 0; f < kV; ++f) pack.at[f] = rounded<T>(out[i][g * kV + f]);
          if (p.by_packs && d < p.dim)
            store(line + d, pack);
          else
            for (int f = 0; f < kV && d + f < p.dim; ++f) line[d + f] = pack.at[f];
        }
      }
    });
  }

  // Sum over the threads of a row, on each of them.
  template <class F>
  TESSERA_DEVICE C over_row(C value, F combine) const {
    for (int mask = 1; mask < kSide; mask *= 2) value = combine(value, t.shuffle_xor(value, mask));
    return value;
  }

  // sum(do o) of each of a tile's queries, with do's tile in shared memory.
  TESSERA_DEVICE void deltas(C* to, const C* d_out, const void* o, std::int64_t b, int head,
                             int first) {
    with_type<C>(p.dtype, [&](auto tag) {
      using T = decltype(tag);
      const auto from = head_of<const T>(o, p.heads, b, head, p.length, p.dim);
      for (int i = 0; i < kPart; ++i) {
        C sum = 0;
        if (first + row(i) < p.length)
          for (int d = tx; d < p.dim; d += kSide)
            sum += d_out[row(i) * kLd + d] *
                   load_as_compute(from.data[(first + row(i)) * from.stride + d]);
        sum = over_row(sum, [](C a, C b) { return a + b; });
        if (tx == 0) to[row(i)] = sum;
      }
    });
  }

  TESSERA_DEVICE bool sees(int query, int key) const {
    return query < p.length && key < p.length && (!p.causal || key <= query);
  }

  Thread& t;
  const Problem& p;
  const int tx, ty;
};

// Which tile of which head a block works on; the longest walks first.
struct BlockTile {
  int first, head;
  std::int64_t batch;
};
TESSERA_DEVICE BlockTile tile_of(const Thread& t, int heads, int tiles, int tile, bool from_end) {
  const std::int64_t rest = t.block() / tiles;
  const int at = static_cast<int>(t.block() % tiles);
  return {(from_end ? tiles - 1 - at : at) * tile, static_cast<int>(rest % heads), rest / heads};
}

template <class Args, class... P>
Problem problem_of(const Args& a, const P*... pointers) {
  const bool whole = a.head_dim * size_bytes(a.dtype) % 16 == 0;
  return {a.length, a.heads, a.kv_heads, a.head_dim,
          a.scale,  a.dtype, a.causal,   whole && are_aligned(pointers...)};
}

// Calls f with C{} and the smallest of the compiled head sizes that holds `dim`.
template <class F>
void with_shape(DType dtype, int dim, F f) {
  if (dtype == DType::f64)
    f(double{}, std::integral_constant<int, 256>{});
  else if (dim <= 64)
    f(float{}, std::integral_constant<int, 64>{});
  else if (dim <= 128)
    f(float{}, std::integral_constant<int, 128>{});
  else
    f(float{}, std::integral_constant<int, 256>{});
}

}  // namespace tessera::kernels::cuda::attention_tiles
