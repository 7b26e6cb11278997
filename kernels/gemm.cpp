// Matrix products through Eigen's blocked kernel, called on panels of at most 768 columns: wider
// ones leave the cache. 16-bit floats are widened tile by tile into f32 blocks on the stack.
#include "kernels/gemm.hpp"

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/simd.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

using Eigen::Index;

template <class C, int Order>
using MatrixMap = Eigen::Map<const Eigen::Matrix<C, Eigen::Dynamic, Eigen::Dynamic, Order>, 0,
                             Eigen::OuterStride<>>;
template <class C>
using OutputMap = Eigen::Map<Eigen::Matrix<C, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>, 0,
                             Eigen::OuterStride<>>;

// A matrix as op() sees it: transposed is column-major.
template <class C>
struct View {
  const C* data;
  std::int64_t ld;
  bool transposed;

  const C* at(std::int64_t row, std::int64_t col) const {
    return transposed ? data + col * ld + row : data + row * ld + col;
  }
  View from(std::int64_t row, std::int64_t col) const { return {at(row, col), ld, transposed}; }
};

struct Sizes {
  std::int64_t m, n, k;
};

// c += alpha a b. Calls Eigen's product below its expressions, which would choose another algorithm
// for tiny shapes, one whose bits depend on how the output is aligned.
template <class C, int OrderA, int OrderB>
void multiply_ordered(C* c, std::int64_t ldc, View<C> a, View<C> b, Sizes s, C alpha) {
  using A = MatrixMap<C, OrderA>;
  using B = MatrixMap<C, OrderB>;
  const A lhs(a.data, static_cast<Index>(s.m), static_cast<Index>(s.k),
              Eigen::OuterStride<>(static_cast<Index>(a.ld)));
  const B rhs(b.data, static_cast<Index>(s.k), static_cast<Index>(s.n),
              Eigen::OuterStride<>(static_cast<Index>(b.ld)));
  OutputMap<C> out(c, static_cast<Index>(s.m), static_cast<Index>(s.n),
                   Eigen::OuterStride<>(static_cast<Index>(ldc)));
  Eigen::internal::generic_product_impl<A, B, Eigen::DenseShape, Eigen::DenseShape,
                                        Eigen::GemmProduct>::scaleAndAddTo(out, lhs, rhs, alpha);
}

template <class C>
void multiply(C* c, std::int64_t ldc, View<C> a, View<C> b, Sizes s, C alpha) {
  using Eigen::ColMajor, Eigen::RowMajor;
  if (a.transposed && b.transposed)
    multiply_ordered<C, ColMajor, ColMajor>(c, ldc, a, b, s, alpha);
  else if (a.transposed)
    multiply_ordered<C, ColMajor, RowMajor>(c, ldc, a, b, s, alpha);
  else if (b.transposed)
    multiply_ordered<C, RowMajor, ColMajor>(c, ldc, a, b, s, alpha);
  else
    multiply_ordered<C, RowMajor, RowMajor>(c, ldc, a, b, s, alpha);
}

// c = beta c + bias, the start of the accumulation; beta 0 does not read c.
template <class C>
void start(C* c, std::int64_t ldc, const C* bias, Sizes s, C beta) {
  const Vec<C> factor(beta), zero(C(0));
  for (std::int64_t i = 0; i < s.m; ++i, c += ldc) {
    if (beta == C(1) && bias == nullptr) return;
    if (beta == C(0) && bias == nullptr)
      map(c, s.n, [zero] { return zero; });
    else if (beta == C(0))
      map(c, s.n, [](Vec<C> b) { return b; }, bias);
    else if (bias == nullptr)
      map(c, s.n, [factor](Vec<C> x) { return factor * x; }, c);
    else
      map(c, s.n, [factor](Vec<C> x, Vec<C> b) { return fma(factor, x, b); }, c, bias);
  }
}

// One panel of C, computed where it lies.
template <class C>
void direct_panel(const GemmArgs& args, C* c, View<C> a, View<C> b, const C* bias, Sizes s) {
  start(c, args.ldc, bias, s, static_cast<C>(args.beta));
  if (s.k > 0) multiply(c, args.ldc, a, b, s, static_cast<C>(args.alpha));
}

constexpr std::int64_t kTileRows = 128, kTileCols = 256, kTileDepth = 256;

// A rows x cols corner of `from`, widened to f32 in the same storage order.
template <class T>
View<float> widen(float* to, View<T> from, std::int64_t rows, std::int64_t cols) {
  const std::int64_t lines = from.transposed ? cols : rows, length = from.transposed ? rows : cols;
  for (std::int64_t i = 0; i < lines; ++i)
    map(to + i * length, length, [](Vec<float> x) { return x; }, from.data + i * from.ld);
  return {to, length, from.transposed};
}

// One tile of C in f32, rounded once at the end.
template <class T, class Out>
void widened_tile(const GemmArgs& args, Out* c, View<T> a, View<T> b, const T* bias, Sizes s) {
  alignas(64) float a_block[kTileRows * kTileDepth];
  alignas(64) float b_block[kTileDepth * kTileCols];
  alignas(64) float sums[kTileRows * kTileCols];
  std::fill_n(sums, s.m * s.n, 0.0f);
  for (std::int64_t first = 0; first < s.k; first += kTileDepth) {
    const std::int64_t depth = std::min(kTileDepth, s.k - first);
    multiply(sums, s.n, widen(a_block, a.from(0, first), s.m, depth),
             widen(b_block, b.from(first, 0), depth, s.n), {s.m, s.n, depth}, 1.0f);
  }
  const Vec<float> alpha(static_cast<float>(args.alpha)), beta(static_cast<float>(args.beta));
  for (std::int64_t i = 0; i < s.m; ++i) {
    Out* row = c + i * args.ldc;
    for_lanes<float>(s.n, [&](std::int64_t j, auto io) {
      Vec<float> v = alpha * io.load(sums + i * s.n + j);
      if (args.beta != 0) v = fma(beta, io.load(row + j), v);
      if (bias != nullptr) v = v + io.load(bias + j);
      io.store(row + j, v);
    });
  }
}

// How C is cut: rows x cols tasks of at most these sizes. By shape alone; tall panels are cut only
// where there are too few others to share, because every cut packs B once more.
struct Grid {
  std::int64_t rows, cols, row_tasks, col_tasks;
};

Grid panel_grid(std::int64_t m, std::int64_t n, std::int64_t batch) {
  constexpr std::int64_t widest = 768, least_rows = 512, wanted = 4;
  Grid g{};
  g.col_tasks = (n + widest - 1) / widest;
  g.cols = std::min(n, ((n + g.col_tasks - 1) / g.col_tasks + 15) / 16 * 16);
  g.col_tasks = (n + g.cols - 1) / g.cols;
  const std::int64_t pieces = std::clamp<std::int64_t>(wanted / (g.col_tasks * batch), 1,
                                                       std::max<std::int64_t>(1, m / least_rows));
  g.rows = std::min(m, ((m + pieces - 1) / pieces + 15) / 16 * 16);
  g.row_tasks = (m + g.rows - 1) / g.rows;
  return g;
}

Grid tile_grid(std::int64_t m, std::int64_t n) {
  return {kTileRows, kTileCols, (m + kTileRows - 1) / kTileRows, (n + kTileCols - 1) / kTileCols};
}

// Calls f(c, a, b, bias, sizes) for every task of every matrix of the batch.
template <class T, class Out, class F>
void for_grid(const GemmArgs& args, const Grid& g, Exec& exec, F f) {
  parallel_for(exec, args.batch * g.row_tasks * g.col_tasks, [&](std::int64_t task) {
    const std::int64_t i = task / g.col_tasks % g.row_tasks * g.rows,
                       j = task % g.col_tasks * g.cols;
    const std::int64_t batch = task / (g.col_tasks * g.row_tasks);
    const View<T> a{static_cast<const T*>(args.a) + batch * args.a_batch_stride, args.lda,
                    args.trans_a};
    const View<T> b{static_cast<const T*>(args.b) + batch * args.b_batch_stride, args.ldb,
                    args.trans_b};
    const T* bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + j;
    f(static_cast<Out*>(args.c) + batch * args.c_batch_stride + i * args.ldc + j, a.from(i, 0),
      b.from(0, j), bias,
      Sizes{std::min<std::int64_t>(g.rows, args.m - i), std::min<std::int64_t>(g.cols, args.n - j),
            args.k});
  });
}

template <class T, class Out>
void run(const GemmArgs& args, Exec& exec) {
  if constexpr (std::is_same_v<T, Compute<T>>) {
    for_grid<T, T>(args, panel_grid(args.m, args.n, args.batch), exec,
                   [&](auto... task) { direct_panel<T>(args, task...); });
  } else {
    for_grid<T, Out>(args, tile_grid(args.m, args.n), exec,
                     [&](auto... task) { widened_tile<T, Out>(args, task...); });
  }
}

}  // namespace

void gemm(const GemmArgs& args, Exec& exec) {
  if (args.m == 0 || args.n == 0 || args.batch == 0) return;
  visit_floating(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (args.c_dtype == args.dtype)
      run<T, T>(args, exec);
    else
      run<T, float>(args, exec);
  });
}

}  // namespace tessera::kernels::cpu
