// Matrices as 8-bit floats, tile by tile of 128 by 128: a tile is widened into scratch, its scales
// are found, then both its forms are written.
#include "kernels/quantize.hpp"

#include <array>
#include <cmath>

#include "kernels/host/convert.hpp"
#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/scratch.hpp"
#include "kernels/host/simd.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

// NaN is no larger than anything.
float larger_magnitude(float most, float x) { return std::abs(x) > most ? std::abs(x) : most; }

template <class T>
float magnitude_of(const T* x, std::int64_t count) {
  float most = 0;
  for (std::int64_t i = 0; i < count; ++i) most = larger_magnitude(most, static_cast<float>(x[i]));
  return most;
}

struct Tile {
  std::int64_t rows, cols;  // that are there
  alignas(64) float x[kScaledBlock][kScaledBlock];
};

// The magnitudes that count for each row of the tile, and for each column.
struct Magnitudes {
  std::array<float, kScaledBlock> of_row{}, of_col{};
};
Magnitudes magnitudes_of(const Tile& tile, Scaling scaling, float of_all) {
  Magnitudes most;
  for (std::int64_t r = 0; r < tile.rows; ++r)
    for (std::int64_t c = 0; c < tile.cols; ++c) {
      float &row = most.of_row[static_cast<std::size_t>(r)],
            &col = most.of_col[static_cast<std::size_t>(c)];
      row = larger_magnitude(row, tile.x[r][c]);
      col = larger_magnitude(col, tile.x[r][c]);
    }
  if (scaling == Scaling::rows) return most;
  const float one =
      scaling == Scaling::tensor ? of_all : magnitude_of(most.of_row.data(), kScaledBlock);
  most.of_row.fill(one);
  most.of_col.fill(one);
  return most;
}

// Codes of the tile, or of its transpose, whose rows are `length` elements long in memory. get(r,
// c) is an element of it.
template <class Code, class Get>
void write(Code* codes, std::int64_t length, std::int64_t rows, std::int64_t cols,
           const std::array<float, kScaledBlock>& most, Get get) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float factor = 1 / float8_scale<Code>(most[static_cast<std::size_t>(r)]);
    for (std::int64_t c = 0; c < cols; ++c) codes[r * length + c] = Code(get(r, c) * factor);
  }
}
// Of the tile at (row, col) of a matrix [all_rows, all_cols].
template <class Code>
void write_scales(float* scales, Scaling scaling, std::int64_t all_rows, std::int64_t all_cols,
                  std::int64_t row, std::int64_t col, const std::array<float, kScaledBlock>& most) {
  const std::int64_t stride = scale_stride(scaling, all_rows, all_cols);
  if (scaling == Scaling::rows) {
    for (std::int64_t r = 0; r < std::min(kScaledBlock, all_rows - row); ++r)
      scales[scale_index(scaling, stride, row + r, col)] =
          float8_scale<Code>(most[static_cast<std::size_t>(r)]);
  } else if (scaling == Scaling::blocks) {
    float* const at = scales + scale_index(scaling, stride, row, col);
    *at = float8_scale<Code>(most[0]);
    if (col + kScaledBlock >= all_cols)
      for (std::int64_t i = 1; col / kScaledBlock + i < stride; ++i) at[i] = 0;
  } else if (row == 0 && col == 0) {
    *scales = float8_scale<Code>(most[0]);
  }
}

template <class T, class Code>
void quantize_tile(const QuantizeArgs& a, std::int64_t row, std::int64_t col, float of_all) {
  Tile& tile = in_scratch<Tile>();
  tile.rows = std::min(kScaledBlock, a.rows - row);
  tile.cols = std::min(kScaledBlock, a.cols - col);
  for (std::int64_t r = 0; r < tile.rows; ++r)
    convert(tile.x[r], static_cast<const T*>(a.x) + (row + r) * a.cols + col, tile.cols);
  const Magnitudes most = magnitudes_of(tile, a.scaling, of_all);
  if (a.codes) {
    write(static_cast<Code*>(a.codes) + row * a.cols + col, a.cols, tile.rows, tile.cols,
          most.of_row, [&](std::int64_t r, std::int64_t c) { return tile.x[r][c]; });
    write_scales<Code>(a.scales, a.scaling, a.rows, a.cols, row, col, most.of_row);
  }
  if (a.transposed) {
    write(static_cast<Code*>(a.transposed) + col * a.rows + row, a.rows, tile.cols, tile.rows,
          most.of_col, [&](std::int64_t r, std::int64_t c) { return tile.x[c][r]; });
    float* const scales = a.scaling == Scaling::tensor ? a.scales : a.transposed_scales;
    write_scales<Code>(scales, a.scaling, a.cols, a.rows, col, row, most.of_col);
  }
}

}  // namespace

void amax(const AmaxArgs& a, Exec& exec) {
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const AmaxPieces pieces = amax_pieces(a.count);
    if constexpr (sizeof(T) <= sizeof(float))
      parallel_for(exec, pieces.count, [&](std::int64_t p) {
        const std::int64_t begin = p * pieces.length;
        a.most[p] = magnitude_of(static_cast<const T*>(a.x) + begin,
                                 std::min(pieces.length, a.count - begin));
      });
  });
}

void quantize(const QuantizeArgs& a, Exec& exec) {
  const float of_all =
      a.scaling == Scaling::tensor ? magnitude_of(a.most, amax_pieces(a.rows * a.cols).count) : 0;
  const std::int64_t across = scaled_blocks(a.cols);
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) <= sizeof(float))
      visit_float8(a.to, [&](auto code) {
        parallel_for(exec, scaled_blocks(a.rows) * across, [&](std::int64_t task) {
          quantize_tile<T, typename decltype(code)::type>(a, task / across * kScaledBlock,
                                                          task % across * kScaledBlock, of_all);
        });
      });
  });
}

}  // namespace tessera::kernels::cpu
