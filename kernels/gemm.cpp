// Blocked matrix products: panels of A and B are packed, in the order in which the register kernel
// reads them, into fixed blocks of the thread's scratch. Nothing is allocated, and the cuts depend
// on the shape alone, so that bits are the same for any threads and caches. Source: Goto and van de
// Geijn, "Anatomy of high-performance matrix multiplication", 2008.
//
//   C panel           =  A block          x  B panel
//   768 columns          144 x 384, L2       384 x 768, L2 and L3 cache
//   6 x 16 a time        6-row slivers       16-column slivers, L1 cache
//
// 16-bit floats are widened while they are packed, and alpha is multiplied into A.
#include "kernels/gemm_gelu.hpp"
#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/scratch.hpp"
#include "kernels/host/tile.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

constexpr std::int64_t kRows = kTileRowsAtOnce;  // of a sliver of A
constexpr std::int64_t kBlockRows = 24 * kRows;  // of a packed block of A
constexpr std::int64_t kDepth = 384;             // of packed blocks
constexpr std::int64_t kLeastRows = 512;         // of a task, where C is cut into rows at all
template <class C>
constexpr std::int64_t kPanelCols =
    768 * 4 / std::int64_t{sizeof(C)};  // f64 panels are half as wide
template <class C>
constexpr std::int64_t kCols = kTileStep<C>;  // of a sliver of B

// A matrix as op() sees it: element (row, col) lies at data[row * row_step + col * col_step].
template <class T>
struct View {
  const T* data;
  std::int64_t row_step, col_step;

  static View of(const void* base, std::int64_t offset, std::int64_t ld, bool transposed) {
    return {static_cast<const T*>(base) + offset, transposed ? 1 : ld, transposed ? ld : 1};
  }
  View from(std::int64_t row, std::int64_t col) const {
    return {data + row * row_step + col * col_step, row_step, col_step};
  }
  View flipped() const { return {data, col_step, row_step}; }
};

struct Sizes {
  std::int64_t m, n, k;
};

// Packs slivers of `Width` rows of `from` [rows, depth]: out[sliver][l][i] = factor * from(i, l);
// missing rows are zero. A function of its own, whose loops have all registers: inlined into a
// task, it loads addresses again for every element.
template <std::int64_t Width, class T>
[[gnu::noinline]] void pack_slivers(Compute<T>* out, View<T> from, std::int64_t rows,
                                    std::int64_t depth, Compute<T> factor) {
  using C = Compute<T>;
  // Whole vectors may write beyond a column: the next column, or the next sliver, overwrites that.
  constexpr std::int64_t lanes = kLanes<C>, whole = (Width + lanes - 1) / lanes * lanes;
  const Vec<C> scale(factor);
  for (std::int64_t first = 0; first < rows;
       first += Width, out += Width * depth, from = from.from(Width, 0)) {
    const std::int64_t width = std::min(Width, rows - first);
    const auto value = [&](std::int64_t i, std::int64_t l) {
      return factor * static_cast<C>(from.data[i * from.row_step + l * from.col_step]);
    };
    const bool has_whole = rows - first >= whole;
    if (has_whole && from.row_step == 1) {
      for (std::int64_t l = 0; l < depth; ++l)
        for (std::int64_t i = 0; i < whole; i += lanes)
          store(out + l * Width + i, scale * load(from.data + i + l * from.col_step));
    } else if (has_whole && from.col_step == 1) {
      std::int64_t l = 0;
      for (; l + lanes <= depth; l += lanes) {
        for (std::int64_t i = whole - lanes; i >= 0; i -= lanes) {  // the last goes beyond a column
          Vec<C> square[lanes];
          for (std::int64_t r = 0; r < lanes; ++r)
            square[r] = scale * load(from.data + (i + r) * from.row_step + l);
          transpose(square);
          for (std::int64_t r = 0; r < lanes; ++r) store(out + (l + r) * Width + i, square[r]);
        }
      }
      for (; l < depth; ++l)
        for (std::int64_t i = 0; i < Width; ++i) out[l * Width + i] = value(i, l);
    } else if (width == Width) {
      for (std::int64_t l = 0; l < depth; ++l)
        for (std::int64_t i = 0; i < Width; ++i) out[l * Width + i] = value(i, l);
    } else {
      for (std::int64_t l = 0; l < depth; ++l)
        for (std::int64_t i = 0; i < Width; ++i)
          out[l * Width + i] = i < width ? value(i, l) : C(0);
    }
  }
}

// The same where a sliver's rows are neighbours in memory: several slivers at once, so that every
// page is visited rarely.
template <std::int64_t Width, class T>
[[gnu::noinline]] void pack(Compute<T>* out, View<T> from, std::int64_t rows, std::int64_t depth,
                            Compute<T> factor) {
  using C = Compute<T>;
  constexpr std::int64_t together = 8 * Width;
  std::int64_t done = 0;
  if constexpr (Width % kLanes<C> == 0) {
    const Vec<C> scale(factor);
    for (; from.row_step == 1 && done + together <= rows; done += together)
      for (std::int64_t l = 0; l < depth; ++l)
        for (std::int64_t i = 0; i < together; i += kLanes<C>)
          store(out + (done + i) / Width * Width * depth + l * Width + i % Width,
                scale * load(from.data + done + i + l * from.col_step));
  }
  pack_slivers<Width>(out + done * depth, from.from(done, 0), rows - done, depth, factor);
}

// c (+)= one sliver of A times one of B; at the edges through a full tile on the stack.
template <class C>
void sliver_product(C* c, std::int64_t ldc, const C* a, const C* b, Sizes s, bool accumulate) {
  constexpr std::int64_t cols = kCols<C>;
  // C is far away: its lines, and the pages that they lie in, are fetched while the product is
  // formed.
  for (std::int64_t i = 0; i < s.m; ++i) {
    __builtin_prefetch(c + i * ldc);
    __builtin_prefetch(c + i * ldc + s.n - 1);
  }
  if (s.m == kRows && s.n == cols)
    return tile_block<kRows, C>(c, ldc, {a, 1, kRows}, {b, cols}, s.k, accumulate);
  alignas(64) C tile[kRows * cols];
  tile_block<kRows, C>(tile, cols, {a, 1, kRows}, {b, cols}, s.k, false);
  for (std::int64_t i = 0; i < s.m; ++i)
    for (std::int64_t j = 0; j < s.n; ++j)
      c[i * ldc + j] = accumulate ? c[i * ldc + j] + tile[i * cols + j] : tile[i * cols + j];
}

// What is packed at a time.
template <class C>
struct Packed {
  alignas(64) C a_block[kBlockRows * kDepth];
  alignas(64) C b_panel[kDepth * kPanelCols<C>];
};

// c (+)= alpha a b for a panel of at most kPanelCols columns and k > 0.
template <class T>
void panel_product(Packed<Compute<T>>& packed, Compute<T>* c, std::int64_t ldc, View<T> a,
                   View<T> b, Sizes s, Compute<T> alpha, bool accumulate) {
  using C = Compute<T>;
  auto& [a_block, b_panel] = packed;
  const std::int64_t passes = (s.k + kDepth - 1) / kDepth, depth = (s.k + passes - 1) / passes;
  for (std::int64_t l = 0; l < s.k; l += depth, accumulate = true) {
    const std::int64_t k = std::min(depth, s.k - l);
    pack<kCols<C>>(b_panel, b.from(l, 0).flipped(), s.n, k, C(1));
    for (std::int64_t block = 0; block < s.m; block += kBlockRows) {
      const std::int64_t rows = std::min(kBlockRows, s.m - block);
      pack<kRows>(a_block, a.from(block, l), rows, k, alpha);
      for (std::int64_t j = 0; j < s.n; j += kCols<C>)
        for (std::int64_t i = 0; i < rows; i += kRows)
          sliver_product(c + (block + i) * ldc + j, ldc, a_block + i * k, b_panel + j * k,
                         {std::min(kRows, rows - i), std::min(kCols<C>, s.n - j), k}, accumulate);
    }
  }
}

// c = beta c0 + bias, the start of a sum; beta 0 does not read c0.
template <class C, class T>
void start(C* c, const C* c0, std::int64_t ldc, const T* bias, Sizes s, C beta) {
  const Vec<C> factor(beta), zero(C(0));
  for (std::int64_t i = 0; i < s.m; ++i, c += ldc, c0 += ldc) {
    for_lanes<C>(s.n, [&](std::int64_t j, auto io) {
      const Vec<C> add = bias == nullptr ? zero : io.load(bias + j);
      io.store(c + j, beta == C(0) ? add : fma(factor, io.load(c0 + j), add));
    });
  }
}

// One task whose C has the computing type: summed where it lies.
template <class T>
void direct_task(const GemmArgs& args, Compute<T>* c, const Compute<T>* c0, View<T> a, View<T> b,
                 const T* bias, Sizes s) {
  using C = Compute<T>;
  const bool plain = bias == nullptr && (args.beta == 0 || (args.beta == 1 && c0 == c)) && s.k > 0;
  if (!plain) start(c, c0, args.ldc, bias, s, static_cast<C>(args.beta));
  if (s.k > 0)
    panel_product(in_scratch<Packed<C>>(), c, args.ldc, a, b, s, static_cast<C>(args.alpha),
                  !plain || args.beta == 1);
}

// One task whose C is 16-bit: summed in f32 over all of k, rounded once.
struct Rounded {
  Packed<float> packed;
  alignas(64) float sums[kBlockRows * kPanelCols<float>];
};
template <class T>
void rounded_task(const GemmArgs& args, T* c, const T* c0, View<T> a, View<T> b, const T* bias,
                  Sizes s) {
  auto& [packed, sums] = in_scratch<Rounded>();
  start(sums, sums, s.n, bias, s, 0.0f);
  if (s.k > 0) panel_product(packed, sums, s.n, a, b, s, static_cast<float>(args.alpha), true);
  const Vec<float> beta(static_cast<float>(args.beta));
  for (std::int64_t i = 0; i < s.m; ++i, c += args.ldc, c0 += args.ldc) {
    for_lanes<float>(s.n, [&](std::int64_t j, auto io) {
      const Vec<float> v = io.load(sums + i * s.n + j);
      io.store(c + j, args.beta == 0 ? v : fma(beta, io.load(c0 + j), v));
    });
  }
}

// How C is cut into tasks, by shape alone.
struct Grid {
  std::int64_t rows, cols, row_tasks, col_tasks;
};

Grid grid_of(const GemmArgs& args, std::int64_t widest, std::int64_t tallest) {
  const auto cut = [](std::int64_t size, std::int64_t pieces, std::int64_t multiple) {
    return std::min(size, ((size + pieces - 1) / pieces + multiple - 1) / multiple * multiple);
  };
  const std::int64_t m = args.m, n = args.n;
  Grid g{};
  g.cols = cut(n, (n + widest - 1) / widest, 16);
  g.col_tasks = (n + g.cols - 1) / g.cols;
  // Tall panels are cut only where there are too few others to share: every cut packs B once more.
  const std::int64_t wanted = std::clamp<std::int64_t>(4 / (g.col_tasks * args.batch), 1,
                                                       std::max<std::int64_t>(1, m / kLeastRows));
  g.rows = cut(m, std::max(wanted, (m + tallest - 1) / tallest), kRows);
  g.row_tasks = (m + g.rows - 1) / g.rows;
  return g;
}

// Calls f(c, c0, a, b, bias, sizes) for every task of every matrix of the batch.
template <class T, class Out, class F>
void for_grid(const GemmArgs& args, const Grid& g, Exec& exec, F f) {
  parallel_for(exec, args.batch * g.row_tasks * g.col_tasks, [&](std::int64_t task) {
    const std::int64_t i = task / g.col_tasks % g.row_tasks * g.rows,
                       j = task % g.col_tasks * g.cols;
    const std::int64_t batch = task / (g.col_tasks * g.row_tasks);
    const auto a = View<T>::of(args.a, batch * args.a_batch_stride, args.lda, args.trans_a);
    const auto b = View<T>::of(args.b, batch * args.b_batch_stride, args.ldb, args.trans_b);
    const T* bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + j;
    const std::int64_t at = batch * args.c_batch_stride + i * args.ldc + j;
    f(static_cast<Out*>(args.c) + at,
      static_cast<const Out*>(args.c0 == nullptr ? args.c : args.c0) + at, a.from(i, 0),
      b.from(0, j), bias,
      Sizes{std::min<std::int64_t>(g.rows, args.m - i), std::min<std::int64_t>(g.cols, args.n - j),
            args.k});
  });
}

}  // namespace

void gemm(const GemmArgs& args, Exec& exec) {
  if (args.m == 0 || args.n == 0 || args.batch == 0) return;
  visit_floating(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    if (args.c_dtype == dtype_of<C>())
      for_grid<T, C>(args, grid_of(args, kPanelCols<C>, args.m), exec,
                     [&](auto... task) { direct_task<T>(args, task...); });
    else if constexpr (!std::is_same_v<T, C>)
      for_grid<T, T>(args, grid_of(args, kPanelCols<C>, kBlockRows), exec,
                     [&](auto... task) { rounded_task<T>(args, task...); });
  });
}

void gemm_gelu(const GemmGeluArgs& args, Exec& exec) {
  gemm_then_gelu(args, exec, gemm, unary, binary);
}

}  // namespace tessera::kernels::cpu
