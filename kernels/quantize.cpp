// Matrices as 8-bit floats, tile by tile of 128 by 128: a tile is widened into scratch, its scales
// are found, then both its forms are written.
#include "kernels/quantize.hpp"

#include <array>
#include <cmath>

#include "kernels/formulas.hpp"
#include "kernels/host/convert.hpp"
#include "kernels/host/cpu.hpp"
#include "kernels/host/norm_row.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/scratch.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

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
      row = magnitude_of(&tile.x[r][c], 1, row);
      col = magnitude_of(&tile.x[r][c], 1, col);
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
    const float factor = inverse_of_scale(float8_scale<Code>(most[static_cast<std::size_t>(r)]));
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

// What is rounded: get(out, row, col, n) writes n elements of a row, as T, to `out` or says where
// they lie.
template <class T>
struct Whole {
  const T* x;
  std::int64_t cols;
  const T* get(T*, std::int64_t row, std::int64_t col, std::int64_t) const {
    return x + row * cols + col;
  }
};
template <class T>
struct Normed {
  const T *x, *weight, *bias;
  const float *mean, *rstd;
  std::int64_t cols;
  const T* get(T* out, std::int64_t row, std::int64_t col, std::int64_t n) const {
    write_normed(out, x + row * cols + col, weight == nullptr ? nullptr : weight + col,
                 bias == nullptr ? nullptr : bias + col, mean == nullptr ? 0 : mean[row], rstd[row],
                 n);
    return out;
  }
};
template <class T>
struct Gated {
  const T *gate, *up;
  std::int64_t gate_stride, up_stride;
  const T* get(T* out, std::int64_t row, std::int64_t col, std::int64_t n) const {
    using V = Vec<float>;
    map(
        out, n, [](V g, V u) { return silu(g) * u; }, gate + row * gate_stride + col,
        up + row * up_stride + col);
    return out;
  }
};

template <class Code, class T, class Source>
void quantize_tile(const Quantized& a, const Source& source, TypeTag<T>, std::int64_t row,
                   std::int64_t col, float of_all) {
  Tile& tile = in_scratch<Tile>();
  tile.rows = std::min(kScaledBlock, a.rows - row);
  tile.cols = std::min(kScaledBlock, a.cols - col);
  T made[kScaledBlock];
  for (std::int64_t r = 0; r < tile.rows; ++r)
    convert(tile.x[r], source.get(made, row + r, col, tile.cols), tile.cols);
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

// f(tag) with the type of what 8-bit floats are made of.
template <class F>
void visit_rounded(DType dtype, F f) {
  visit_floating(dtype, [&](auto tag) {
    if constexpr (sizeof(typename decltype(tag)::type) <= sizeof(float)) f(tag);
  });
}

// source(tag) makes what is rounded.
template <class MakeSource>
void quantize_tiles(const Quantized& a, Exec& exec, MakeSource source) {
  const float of_all = a.scaling == Scaling::tensor ? magnitude_of(a.most, a.pieces) : 0;
  const std::int64_t across = scaled_blocks(a.cols);
  visit_rounded(a.dtype, [&](auto tag) {
    visit_float8(a.to, [&](auto code) {
      parallel_for(exec, scaled_blocks(a.rows) * across, [&](std::int64_t task) {
        quantize_tile<typename decltype(code)::type>(a, source(tag), tag,
                                                     task / across * kScaledBlock,
                                                     task % across * kScaledBlock, of_all);
      });
    });
  });
}

}  // namespace

void amax(const AmaxArgs& a, Exec& exec) {
  visit_rounded(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const AmaxPieces pieces = amax_pieces(a.count);
    parallel_for(exec, pieces.count, [&](std::int64_t p) {
      const std::int64_t begin = p * pieces.length;
      a.most[p] = magnitude_of(static_cast<const T*>(a.x) + begin,
                               std::min(pieces.length, a.count - begin));
    });
  });
}

void amax_swiglu(const AmaxSwigluArgs& a, Exec& exec) {
  visit_rounded(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Gated<T> source{static_cast<const T*>(a.gate), static_cast<const T*>(a.up), a.gate_stride,
                          a.up_stride};
    const std::int64_t count = a.rows * a.cols;
    const AmaxPieces pieces = amax_pieces(count);
    parallel_for(exec, pieces.count, [&](std::int64_t p) {
      T made[kScaledBlock];
      float most = 0;
      const std::int64_t end = std::min(count, (p + 1) * pieces.length);
      for (std::int64_t i = p * pieces.length, n = 0; i < end; i += n) {
        n = std::min({kScaledBlock, end - i, a.cols - i % a.cols});
        most = magnitude_of(source.get(made, i / a.cols, i % a.cols, n), n, most);
      }
      a.most[p] = most;
    });
  });
}

void quantize(const QuantizeArgs& a, Exec& exec) {
  quantize_tiles(a.out, exec, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return Whole<T>{static_cast<const T*>(a.x), a.out.cols};
  });
}

void quantize_norm(const QuantizeNormArgs& a, Exec& exec) {
  quantize_tiles(a.out, exec, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return Normed<T>{static_cast<const T*>(a.input),
                     static_cast<const T*>(a.weight),
                     static_cast<const T*>(a.bias),
                     a.mean,
                     a.rstd,
                     a.out.cols};
  });
}

void quantize_swiglu(const QuantizeSwigluArgs& a, Exec& exec) {
  quantize_tiles(a.out, exec, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return Gated<T>{static_cast<const T*>(a.gate), static_cast<const T*>(a.up), a.gate_stride,
                    a.up_stride};
  });
}

}  // namespace tessera::kernels::cpu
