// Matrices as 8-bit floats: a block has a tile of 128 by 128, which is read once. A thread keeps
// its packs in registers for the codes, and lays them into shared memory for the transposed ones:
//
//   memory ─ packs of 16 bytes ─┬─ registers ─ codes, packs of half as many bytes, or a quarter
//                               └─ shared memory ─ down the columns ─ 16 codes, 16 bytes
#include "kernels/quantize.hpp"

#include <cmath>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/rows.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kTile = kScaledBlock;
constexpr int kCodes = 16, kParts = kTile / kCodes;  // of a column: 16 codes at a time

// NaN is no larger than anything.
struct Larger {
  TESSERA_DEVICE float operator()(float a, float b) const { return b > a ? b : a; }
};
template <class T, int N>
TESSERA_DEVICE float magnitude_of(const Held<T, N>& held, float most) {
  const Pack<T, N> pack = held;
  for (int j = 0; j < N; ++j) most = Larger{}(most, std::abs(load_as_compute(pack.at[j])));
  return most;
}

template <class T>
struct Amax {
  AmaxArgs a;
  std::int64_t length;

  TESSERA_DEVICE void operator()(Thread& t) const {
    constexpr int N = kPack<T>, kAtOnce = 4;
    const std::int64_t begin = t.block() * length;
    const std::int64_t end = begin + length < a.count ? begin + length : a.count;
    const T* const x = static_cast<const T*>(a.x);
    float most = 0;
    for (std::int64_t i = begin + N * t.index(); i < end; i += kAtOnce * N * kThreads) {
      Held<T, N> some[kAtOnce] = {};
      unrolled<kAtOnce>([&](int k) {
        if (i + k * N * kThreads < end) some[k] = load_held<N>(x + i + k * N * kThreads);
      });
      unrolled<kAtOnce>([&](int k) { most = magnitude_of<T, N>(some[k], most); });
    }
    most = block_reduce<kThreads>(t, most, t.shared<float>(), Larger{});
    if (t.index() == 0) a.most[t.block()] = most;
  }
};

// The tile in shared memory: rows of an odd number of words, and a word more after each 16 of them,
// so that a warp that reads 8 parts of 4 columns meets 32 banks.
template <class T>
struct Tile {
  static constexpr int kEach = 4 / static_cast<int>(sizeof(T)), kRowWords = kTile / kEach + 1;
  static constexpr std::size_t kBytes = 4 * (kTile * kRowWords + kParts);
  std::uint32_t* words;

  TESSERA_DEVICE static int row(int r) { return r * kRowWords + r / kCodes; }
  template <int N>
  TESSERA_DEVICE void put(int r, int c, const Held<T, N>& held) const {
    std::uint32_t bits[N / kEach];
    static_assert(sizeof bits == sizeof held);
    memcpy(bits, &held, sizeof bits);
    for (int j = 0; j < N / kEach; ++j) words[row(r) + c / kEach + j] = bits[j];
  }
  TESSERA_DEVICE float get(int r, int c) const {
    return load_as_compute(element_of<T>(words + row(r), c));
  }
};

// kScaling: what follows once it is known costs no register.
template <class T, class Code, Scaling kScaling>
struct Quantize {
  static constexpr int N = kPack<T>, kAcross = kTile / N, kRowsAtOnce = kThreads / kAcross,
                       kPacks = kTile / kRowsAtOnce;
  static constexpr std::size_t kShared = Tile<T>::kBytes + (2 * kTile + kWarps) * sizeof(float);
  QuantizeArgs a;
  std::int64_t across, pieces;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const std::int64_t first_row = t.block() / across * kTile,
                       first_col = t.block() % across * kTile;
    const int rows = static_cast<int>(a.rows - first_row < kTile ? a.rows - first_row : kTile),
              cols = static_cast<int>(a.cols - first_col < kTile ? a.cols - first_col : kTile);
    const int c = t.index() % kAcross * N, r = t.index() / kAcross;
    const T* const x = static_cast<const T*>(a.x) + (first_row + r) * a.cols + first_col + c;
    Held<T, N> packs[kPacks] = {};
    unrolled<kPacks>([&](int u) {
      if (r + u * kRowsAtOnce < rows && c < cols)
        packs[u] = load_held<N>(x + u * kRowsAtOnce * a.cols);
    });
    const Tile<T> tile{t.shared<std::uint32_t>()};
    float* const of_cols = t.shared<float>(Tile<T>::kBytes);  // two halves of the rows
    float* const scratch = of_cols + 2 * kTile;
    if (a.transposed) {
      unrolled<kPacks>([&](int u) { tile.template put<N>(r + u * kRowsAtOnce, c, packs[u]); });
      t.sync();
    }
    float most = 0;  // that all the tile shares
    if constexpr (kScaling == Scaling::tensor)
      for (std::int64_t p = t.index(); p < pieces; p += kThreads) most = Larger{}(most, a.most[p]);
    if constexpr (kScaling == Scaling::blocks)
      unrolled<kPacks>([&](int u) { most = magnitude_of<T, N>(packs[u], most); });
    if constexpr (kScaling != Scaling::rows) {
      most = block_reduce<kThreads>(t, most, scratch, Larger{});
      if (t.index() == 0) put_scales(first_row, first_col, most);
    }

    if (a.codes)
      unrolled<kPacks>([&](int u) {
        const int row = r + u * kRowsAtOnce;
        const bool there = row < rows && c < cols;
        float of_row = most;
        if constexpr (kScaling == Scaling::rows) {
          of_row = magnitude_of<T, N>(packs[u], 0);
          for (int mask = kAcross / 2; mask > 0; mask /= 2)
            of_row = Larger{}(of_row, t.shuffle_xor(of_row, mask));
          if (there && c == 0)
            a.scales[scale_index(kScaling, a.rows, first_row + row, first_col)] =
                float8_scale<Code>(of_row);
        }
        if (!there) return;
        const float factor = 1 / float8_scale<Code>(of_row);
        const Pack<T, N> pack = packs[u];
        Pack<Code, N> codes;
        for (int j = 0; j < N; ++j) codes.at[j] = Code(load_as_compute(pack.at[j]) * factor);
        store(static_cast<Code*>(a.codes) + (first_row + row) * a.cols + first_col + c, codes);
      });
    if (!a.transposed) return;

    if constexpr (kScaling == Scaling::rows) {
      const int col = t.index() % kTile, half = t.index() / kTile;
      float of_col = 0;
      for (int i = half * kTile / 2; i < (half + 1) * kTile / 2; ++i)
        of_col = Larger{}(of_col, std::abs(tile.get(i, col)));
      of_cols[t.index()] = of_col;
      t.sync();
      if (half == 0 && col < cols)
        a.transposed_scales[scale_index(kScaling, a.cols, first_col + col, first_row)] =
            float8_scale<Code>(Larger{}(of_cols[col], of_cols[kTile + col]));
    }
    for (int i = t.index(); i < kTile * kParts; i += kThreads) {
      const int part = i % kParts * kCodes, col = i / kParts;
      if (col >= cols || part >= rows) continue;
      const float of_col =
          kScaling == Scaling::rows ? Larger{}(of_cols[col], of_cols[kTile + col]) : most;
      const float factor = 1 / float8_scale<Code>(of_col);
      Pack<Code, kCodes> codes;
      for (int j = 0; j < kCodes; ++j) codes.at[j] = Code(tile.get(part + j, col) * factor);
      store(static_cast<Code*>(a.transposed) + (first_col + col) * a.rows + first_row + part,
            codes);
    }
  }

 private:
  TESSERA_DEVICE void put_scales(std::int64_t row, std::int64_t col, float most) const {
    const float scale = float8_scale<Code>(most);
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

template <class T, class Code>
void start(const QuantizeArgs& a, Exec& exec) {
  const std::int64_t across = scaled_blocks(a.cols), tiles = scaled_blocks(a.rows) * across;
  const auto queue = [&](auto scaling) {
    using Body = Quantize<T, Code, decltype(scaling)::value>;
    launch<kThreads>(exec, {tiles}, Body::kShared,
                     Body{a, across, amax_pieces(a.rows * a.cols).count});
  };
  if (a.scaling == Scaling::tensor) queue(std::integral_constant<Scaling, Scaling::tensor>{});
  if (a.scaling == Scaling::rows) queue(std::integral_constant<Scaling, Scaling::rows>{});
  if (a.scaling == Scaling::blocks) queue(std::integral_constant<Scaling, Scaling::blocks>{});
}

}  // namespace

void amax(const AmaxArgs& a, Exec& exec) {
  const AmaxPieces pieces = amax_pieces(a.count);
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) <= sizeof(float))
      launch<kThreads>(exec, {pieces.count}, kWarps * sizeof(float), Amax<T>{a, pieces.length});
  });
}

void quantize(const QuantizeArgs& a, Exec& exec) {
  visit_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) <= sizeof(float))
      visit_float8(a.to, [&](auto code) { start<T, typename decltype(code)::type>(a, exec); });
  });
}

}  // namespace tessera::kernels::cuda
