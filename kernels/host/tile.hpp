// Small matrix products on tiles that lie in the L1 and L2 caches: registers hold a block of C,
// nothing is packed. Used by attention, whose products are too small for a blocked library call.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/host/simd.hpp"

namespace tessera::kernels::host {

// Columns come in pairs of vectors; rows of B and C are padded to a multiple of this.
template <class C>
inline constexpr int kTileStep = 2 * kLanes<C>;

// 6 x 2 accumulators, 2 of B and 1 of A fit sixteen registers.
inline constexpr int kTileRowsAtOnce = 6;

// A as element (i, l) at a[i * row + l * col]: either orientation of a stored tile.
template <class C>
struct TileA {
  const C* data;
  std::int64_t row, col;
};
template <class C>
struct TileB {
  const C* data;
  std::int64_t ld;
};

// C[i, j] (+)= sum over l in [0, k) of A[i, l] B[l, j] for i < Rows and one pair of vectors of
// columns.
template <int Rows, class C>
inline void tile_block(C* c, std::int64_t ldc, TileA<C> a, TileB<C> b, std::int64_t k,
                       bool accumulate) {
  Vec<C> left[Rows], right[Rows];
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i) left[i] = right[i] = Vec<C>(C(0));
  for (std::int64_t l = 0; l < k; ++l) {
    const Vec<C> b0 = load(b.data + l * b.ld), b1 = load(b.data + l * b.ld + kLanes<C>);
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      const Vec<C> x(a.data[i * a.row + l * a.col]);
      left[i] = fma(x, b0, left[i]);
      right[i] = fma(x, b1, right[i]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i) {
    C *p = c + i * ldc, *q = p + kLanes<C>;
    store(p, accumulate ? load(p) + left[i] : left[i]);
    store(q, accumulate ? load(q) + right[i] : right[i]);
  }
}

// The part of a product on a diagonal tile that is not known to be zero (or not wanted), for rows
// [i, i + rows) of C:
//   columns_from  C's columns from i on                 upper triangle of C
//   columns_to    C's columns up to i + rows            lower triangle of C
//   depth_from    l from i on                           A is upper triangular
//   depth_to      l up to i + rows                      A is lower triangular
enum class Corner { none, columns_from, columns_to, depth_from, depth_to };

// C (+)= A B with A m x k, B k x n, n a multiple of kTileStep. Elements outside the corner's part
// are not written (columns) or read as zero (depth).
template <class C>
void tile_product(C* c, std::int64_t ldc, TileA<C> a, TileB<C> b, std::int64_t m, std::int64_t n,
                  std::int64_t k, bool accumulate, Corner corner = Corner::none) {
  using Block = void (*)(C*, std::int64_t, TileA<C>, TileB<C>, std::int64_t, bool);
  constexpr std::array<Block, 7> blocks = {nullptr,          tile_block<1, C>, tile_block<2, C>,
                                           tile_block<3, C>, tile_block<4, C>, tile_block<5, C>,
                                           tile_block<6, C>};
  constexpr std::int64_t step = kTileStep<C>;
  for (std::int64_t i = 0; i < m; i += kTileRowsAtOnce) {
    const std::int64_t rows = std::min<std::int64_t>(kTileRowsAtOnce, m - i), end = i + rows;
    const std::int64_t first = corner == Corner::columns_from ? i / step * step : 0;
    const std::int64_t last =
        corner == Corner::columns_to ? std::min(n, (end + step - 1) / step * step) : n;
    const std::int64_t from = corner == Corner::depth_from ? std::min(i, k) : 0;
    const std::int64_t to = corner == Corner::depth_to ? std::min(k, end) : k;
    const TileA<C> part{a.data + i * a.row + from * a.col, a.row, a.col};
    for (std::int64_t j = first; j < last; j += step)
      blocks[static_cast<std::size_t>(rows)](
          c + i * ldc + j, ldc, part, {b.data + from * b.ld + j, b.ld}, to - from, accumulate);
  }
}

}  // namespace tessera::kernels::host
