// Matrices as 8-bit floats: a block has a tile of 128 by 128, which is read once. A thread keeps
// its packs in registers for the codes, and lays them into shared memory for the transposed ones:
//
//   memory ─ packs of 16 bytes ─┬─ registers ─ codes, packs of half as many bytes, or a quarter
//                               └─ shared memory ─ words, down the columns ─ 16 codes, 16 bytes
//
// Codes are rounded two by two, which sm_89 and later have an instruction for, and whole tiles go
// without a look at their edges: at 4 bytes an element instructions would be the limit, not memory.
#include "kernels/quantize.hpp"

#include <cmath>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/math.hpp"
#include "kernels/cuda/norm_row.hpp"
#include "kernels/cuda/rows.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kTile = kScaledBlock;
constexpr int kCodes = 16, kParts = kTile / kCodes;  // of a column: 16 codes at a time

// --- What is rounded: packs of a thread's columns as they come from memory, then what is made of
// them. Of 16 bits kBlocks are to run on a multiprocessor. A Reader is at a row and a column.

template <class T>
struct Whole {
  static constexpr int N = kPack<T>, kBlocks = 4;
  const T* x;
  std::int64_t cols;

  using Loaded = Held<T, N>;
  struct Reader {
    const T* from;
    std::int64_t stride;
    TESSERA_DEVICE Reader(const Whole& of, std::int64_t row, std::int64_t col)
        : from(of.x + row * of.cols + col), stride(of.cols) {}
    TESSERA_DEVICE Loaded load(int rows_on) const { return load_held<N>(from + rows_on * stride); }
    TESSERA_DEVICE Held<T, N> finish(const Loaded& loaded, int) const { return loaded; }
  };
};

// What a norm would have written.
template <class T>
struct Normed {
  static constexpr int N = kPack<T>, kBlocks = 2;
  const T *x, *weight, *bias;
  const float *mean, *rstd;
  std::int64_t cols;

  using Loaded = Held<T, N>;
  struct Reader {
    const T* from;
    std::int64_t stride;
    const float *mean, *rstd;
    NormColumns<T, N> columns;
    TESSERA_DEVICE Reader(const Normed& of, std::int64_t row, std::int64_t col)
        : from(of.x + row * of.cols + col),
          stride(of.cols),
          mean(of.mean == nullptr ? nullptr : of.mean + row),
          rstd(of.rstd + row),
          columns(of.weight, of.bias, col) {}
    TESSERA_DEVICE Loaded load(int rows_on) const { return load_held<N>(from + rows_on * stride); }
    TESSERA_DEVICE Held<T, N> finish(const Loaded& loaded, int rows_on) const {
      const float center = mean == nullptr ? 0 : mean[rows_on], scale = rstd[rows_on];
      return held_of<T, N>(
          [&](int j) { return columns.get(value_of<T, N>(loaded, j), j, center, scale); });
    }
  };
};

// What SwiGLU would have written.
template <class T>
struct Gated {
  static constexpr int N = kPack<T>, kBlocks = 2;
  const T *gate, *up;
  std::int64_t gate_stride, up_stride;

  struct Loaded {
    Held<T, N> gate, up;
  };
  struct Reader {
    const T *gate, *up;
    std::int64_t gate_stride, up_stride;
    TESSERA_DEVICE Reader(const Gated& of, std::int64_t row, std::int64_t col)
        : gate(of.gate + row * of.gate_stride + col),
          up(of.up + row * of.up_stride + col),
          gate_stride(of.gate_stride),
          up_stride(of.up_stride) {}
    TESSERA_DEVICE Loaded load(int rows_on) const {
      return {load_held<N>(gate + rows_on * gate_stride), load_held<N>(up + rows_on * up_stride)};
    }
    TESSERA_DEVICE Held<T, N> finish(const Loaded& loaded, int) const {
      const Pack<T, N> of_gate = loaded.gate, of_up = loaded.up;
      return held_of<T, N>([&](int j) {
        return silu(Value(load_as_compute(of_gate.at[j]))).v * load_as_compute(of_up.at[j]);
      });
    }
  };
};

// --- Magnitudes

template <class T, class Source>
struct Amax {
  Source source;
  float* most;
  std::int64_t count, length, cols;

  TESSERA_DEVICE void operator()(Thread& t) const {
    constexpr int N = kPack<T>, kAtOnce = 4;
    const std::int64_t begin = t.block() * length;
    const std::int64_t end = begin + length < count ? begin + length : count;
    Held<T, N> of_places = {};
    for (std::int64_t i = begin + N * t.index(); i < end; i += kAtOnce * N * kThreads) {
      typename Source::Loaded some[kAtOnce] = {};
      unrolled<kAtOnce>([&](int k) {
        if (i + k * N * kThreads < end) some[k] = load(i + k * N * kThreads);
      });
      unrolled<kAtOnce>([&](int k) {
        add_magnitudes<T, N>(of_places, typename Source::Reader(source, 0, 0).finish(some[k], 0));
      });
    }
    const float largest = block_reduce<kThreads>(t, largest_of<T, N>(of_places), t.shared<float>(),
                                                 LargerMagnitude{});
    if (t.index() == 0) most[t.block()] = largest;
  }

  // From element i on, of rows one after another; cols is 0 where they are one.
  TESSERA_DEVICE typename Source::Loaded load(std::int64_t i) const {
    if (cols == 0) return at(0, i);
    const std::int64_t row = i <= 0xffffffff
                                 ? static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(cols)
                                 : i / cols;
    return at(row, i - row * cols);
  }
  TESSERA_DEVICE typename Source::Loaded at(std::int64_t row, std::int64_t col) const {
    return typename Source::Reader(source, row, col).load(0);
  }
};

// --- Codes

// The tile in shared memory: 4 words behind each row, which leave packs aligned, and 4 more behind
// each 16 rows, so that a warp that reads 8 parts of 4 words meets 32 banks.
template <class T>
struct Tile {
  static constexpr int kEach = 4 / static_cast<int>(sizeof(T)), kWords = kTile / kEach,
                       kRowWords = kWords + 4;
  static constexpr std::size_t kBytes = 4 * (kTile * kRowWords + kParts * 4);
  std::uint32_t* words;

  TESSERA_DEVICE std::uint32_t* row(int r) const {
    return words + r * kRowWords + static_cast<unsigned>(r) / kCodes * 4;
  }
  template <int N>
  TESSERA_DEVICE void put(int r, int c, const Held<T, N>& held) const {
    *reinterpret_cast<Held<T, N>*>(row(r) + c / kEach) = held;
  }
};

// kScaling: what follows once it is known costs no register.
template <class T, class Code, Scaling kScaling, class Source>
struct Quantize {
  static constexpr int N = kPack<T>, kAcross = kTile / N, kRowsAtOnce = kThreads / kAcross,
                       kPacks = kTile / kRowsAtOnce;
  static constexpr std::size_t kShared =
      Tile<T>::kBytes + (kWarps * kTile + kTile + kWarps) * sizeof(float);
  static constexpr int kBlocks = sizeof(T) > 2
                                     ? 0
                                     : Source::kBlocks - (kScaling == Scaling::blocks ? 1 : 0);
  Source source;
  Quantized a;
  std::int64_t across;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t row = t.block() / across * kTile, col = t.block() % across * kTile;
    if (row + kTile <= a.rows && col + kTile <= a.cols)
      quantize<true>(t, row, col, kTile, kTile);
    else
      quantize<false>(t, row, col, static_cast<int>(a.rows - row < kTile ? a.rows - row : kTile),
                      static_cast<int>(a.cols - col < kTile ? a.cols - col : kTile));
  }

 private:
  // The tile at (first_row, first_col), of which rows and cols are there: all, where it is full.
  template <bool kIsFull>
  TESSERA_DEVICE void quantize(Thread& t, std::int64_t first_row, std::int64_t first_col, int rows,
                               int cols) const {
    const int c = t.index() % kAcross * N, r = t.index() / kAcross;
    const auto each_row = [&](auto f) {
      unrolled<kPacks>([&](int u) {
        if (kIsFull || (r + u * kRowsAtOnce < rows && c < cols)) f(u, u * kRowsAtOnce);
      });
    };
    Held<T, N> packs[kPacks] = {};
    {
      const typename Source::Reader reader(source, first_row + (kIsFull || r < rows ? r : 0),
                                           first_col + (kIsFull || c < cols ? c : 0));
      if constexpr (std::is_same_v<typename Source::Loaded, Held<T, N>>) {
        each_row([&](int u, int rows_on) { packs[u] = reader.load(rows_on); });
        each_row([&](int u, int rows_on) { packs[u] = reader.finish(packs[u], rows_on); });
      } else {
        typename Source::Loaded loaded[kPacks] = {};
        each_row([&](int u, int rows_on) { loaded[u] = reader.load(rows_on); });
        // ptxas computes with the first before it has asked for the last, but for a branch between.
        const int below = static_cast<int>(a.rows - first_row < kTile ? a.rows - first_row : kTile);
        each_row([&](int u, int rows_on) {
          if (r + rows_on < below) packs[u] = reader.finish(loaded[u], rows_on);
        });
      }
    }

    const Tile<T> tile{t.shared<std::uint32_t>()};
    float* const of_warps = t.shared<float>(Tile<T>::kBytes);  // magnitudes of their columns
    float* const of_cols = of_warps + kWarps * kTile;          // factors
    float* const scratch = of_cols + kTile;
    if (a.transposed) {
      unrolled<kPacks>([&](int u) { tile.template put<N>(r + u * kRowsAtOnce, c, packs[u]); });
      if constexpr (kScaling == Scaling::rows) put_column_magnitudes(t, packs, of_warps + c);
      t.sync();
    }
    float all = 0;  // the factor that all the tile shares
    if constexpr (kScaling != Scaling::rows) {
      float most = 0;
      if constexpr (kScaling == Scaling::tensor)
        for (int p = t.index(); p < a.pieces; p += kThreads) most = std::fmax(most, a.most[p]);
      else
        most = largest_of<T, N>(magnitudes_of(packs));
      const float scale =
          float8_scale<Code>(block_reduce<kThreads>(t, most, scratch, LargerMagnitude{}));
      if (t.index() == 0) put_scales(first_row, first_col, scale);
      all = inverse_of_scale(scale);
    }

    if (a.codes) {
      Code* const to = static_cast<Code*>(a.codes) + (first_row + r) * a.cols + first_col + c;
      unrolled<kPacks>([&](int u) {
        const int row = r + u * kRowsAtOnce;
        const bool is_there = kIsFull || (row < rows && c < cols);
        float factor = all;
        if constexpr (kScaling == Scaling::rows) {
          Held<T, N> magnitudes = {};
          add_magnitudes<T, N>(magnitudes, packs[u]);
          float most = largest_of<T, N>(magnitudes);
          for (int mask = kAcross / 2; mask > 0; mask /= 2)
            most = std::fmax(most, t.shuffle_xor(most, mask));
          const float scale = float8_scale<Code>(most);
          if (is_there && c == 0)
            a.scales[scale_index(kScaling, a.rows, first_row + row, first_col)] = scale;
          factor = inverse_of_scale(scale);
        }
        if (!is_there) return;
        const Pack<T, N> pack = packs[u];
        store_held(to + u * kRowsAtOnce * a.cols,
                   held_of<Code, N>([&](int j) { return load_as_compute(pack.at[j]) * factor; }));
      });
    }
    if (!a.transposed) return;

    if constexpr (kScaling == Scaling::rows) {
      if (const int col = t.index(); col < kTile) {
        float most = 0;
        for (int w = 0; w < kWarps; ++w) most = std::fmax(most, of_warps[w * kTile + col]);
        const float scale = float8_scale<Code>(most);
        of_cols[col] = inverse_of_scale(scale);
        if (kIsFull || col < cols)
          a.transposed_scales[scale_index(kScaling, a.cols, first_col + col, first_row)] = scale;
      }
      t.sync();
    }
    constexpr int kWordsAtOnce = kThreads / kParts;
    const int part = t.index() % kParts * kCodes, first_word = t.index() / kParts;
    if (!kIsFull && part >= rows) return;
    Code* const to = static_cast<Code*>(a.transposed) + first_col * a.rows + first_row + part;
    for (int word = first_word; word < Tile<T>::kWords; word += kWordsAtOnce) {
      std::uint32_t words[kCodes];
      unrolled<kCodes>([&](int j) { words[j] = tile.row(part)[j * Tile<T>::kRowWords + word]; });
      unrolled<Tile<T>::kEach>([&](int e) {
        const int col = word * Tile<T>::kEach + e;
        if (!kIsFull && col >= cols) return;
        const float factor = kScaling == Scaling::rows ? of_cols[col] : all;
        store_held(to + col * a.rows, held_of<Code, kCodes>([&](int j) {
                     return load_as_compute(element_of<T>(words + j, e)) * factor;
                   }));
      });
    }
  }

  TESSERA_DEVICE static Held<T, N> magnitudes_of(const Held<T, N> (&packs)[kPacks]) {
    Held<T, N> most = {};
    unrolled<kPacks>([&](int u) { add_magnitudes<T, N>(most, packs[u]); });
    return most;
  }
  // Of the rows that this warp has; `to` begins at this thread's column.
  TESSERA_DEVICE static void put_column_magnitudes(Thread& t, const Held<T, N> (&packs)[kPacks],
                                                   float* to) {
    const Pack<T, N> of_thread = magnitudes_of(packs);
    unrolled<N>([&](int j) {
      float most = load_as_compute(of_thread.at[j]);
      for (int mask = kAcross; mask < kWarp; mask *= 2)
        most = std::fmax(most, t.shuffle_xor(most, mask));
      if (t.lane() < kAcross) to[t.warp() * kTile + j] = most;
    });
  }
  TESSERA_DEVICE void put_scales(std::int64_t row, std::int64_t col, float scale) const {
    if constexpr (kScaling == Scaling::tensor) {
      if (row == 0 && col == 0) *a.scales = scale;
    } else {
      if (a.codes) put_scale(a.scales, a.rows, a.cols, row, col, scale);
      if (a.transposed) put_scale(a.transposed_scales, a.cols, a.rows, col, row, scale);
    }
  }
  TESSERA_DEVICE static void put_scale(float* scales, std::int64_t all_rows, std::int64_t all_cols,
                                       std::int64_t row, std::int64_t col, float scale) {
    const std::int64_t stride = scale_stride(kScaling, all_rows, all_cols);
    float* const at = scales + scale_index(kScaling, stride, row, col);
    *at = scale;
    if (col + kTile >= all_cols)
      for (std::int64_t i = 1; col / kTile + i < stride; ++i) at[i] = 0;
  }
};

template <class T, class Code, Scaling kScaling, class Source>
void start(const Source& source, const Quantized& a, Exec& exec) {
  const std::int64_t across = scaled_blocks(a.cols);
  using Body = Quantize<T, Code, kScaling, Source>;
  launch<kThreads>(exec, {scaled_blocks(a.rows) * across}, Body::kShared, Body{source, a, across});
}

// f(tag) with the type of what 8-bit floats are made of.
template <class F>
void visit_rounded(DType dtype, F f) {
  visit_floating(dtype, [&](auto tag) {
    if constexpr (sizeof(typename decltype(tag)::type) <= sizeof(float)) f(tag);
  });
}

// f(constant) with one of kScalings.
template <Scaling... kScalings, class F>
void visit_scaling(Scaling scaling, F f) {
  ((scaling == kScalings ? f(std::integral_constant<Scaling, kScalings>{}) : void()), ...);
}

// Of activations, source(tag): in e4m3, with no scales by block.
template <class MakeSource>
void start_made(const Quantized& a, Exec& exec, MakeSource source) {
  visit_rounded(a.dtype, [&](auto tag) {
    visit_scaling<Scaling::tensor, Scaling::rows>(a.scaling, [&](auto scaling) {
      start<typename decltype(tag)::type, Float8E4M3, scaling()>(source(tag), a, exec);
    });
  });
}

template <class T, class Source>
void start_amax(const Source& source, float* most, std::int64_t count, std::int64_t cols,
                Exec& exec) {
  const AmaxPieces pieces = amax_pieces(count);
  launch<kThreads>(exec, {pieces.count}, kWarps * sizeof(float),
                   Amax<T, Source>{source, most, count, pieces.length, cols});
}

}  // namespace

void amax(const AmaxArgs& a, Exec& exec) {
  visit_rounded(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    start_amax<T>(Whole<T>{static_cast<const T*>(a.x), a.count}, a.most, a.count, 0, exec);
  });
}

void amax_swiglu(const AmaxSwigluArgs& a, Exec& exec) {
  if (are_too_many(a.cols, exec)) return;
  const bool are_one = a.gate_stride == a.cols && a.up_stride == a.cols;
  visit_rounded(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    start_amax<T>(Gated<T>{static_cast<const T*>(a.gate), static_cast<const T*>(a.up),
                           a.gate_stride, a.up_stride},
                  a.most, a.rows * a.cols, are_one ? 0 : a.cols, exec);
  });
}

void quantize(const QuantizeArgs& a, Exec& exec) {
  visit_rounded(a.out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    visit_float8(a.out.to, [&](auto code) {
      visit_scaling<Scaling::tensor, Scaling::rows, Scaling::blocks>(
          a.out.scaling, [&](auto scaling) {
            start<T, typename decltype(code)::type, scaling()>(
                Whole<T>{static_cast<const T*>(a.x), a.out.cols}, a.out, exec);
          });
    });
  });
}

void quantize_norm(const QuantizeNormArgs& a, Exec& exec) {
  start_made(a.out, exec, [&](auto tag) {
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
  start_made(a.out, exec, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return Gated<T>{static_cast<const T*>(a.gate), static_cast<const T*>(a.up), a.gate_stride,
                    a.up_stride};
  });
}

}  // namespace tessera::kernels::cuda
