// Indexing along a dimension: rows of one index and elements of their own, additions in order.
#include <limits>

#include "tests/kernels/bounded.hpp"

namespace kernel_test {
namespace {

struct IndexSizes {
  std::int64_t outer, n, inner, count;
  bool shifted = false;
};

using IndexKernel = Kernel<IndexArgs> Kernels::*;

void check_index(Case& c, IndexKernel which, DType dtype, const IndexSizes& s) {
  const bool adds = which == &Kernels::index_add || which == &Kernels::scatter_add,
             has_rows = which == &Kernels::index_select || which == &Kernels::index_add;
  const std::int64_t big_size = s.outer * s.n * s.inner, small_size = s.outer * s.count * s.inner,
                     shift = shift_of(dtype, s.shifted);
  const DType index_dtype = c.integer(0, 1) == 1 ? i32 : i64;
  Operand& big =
      adds ? c.updated(dtype, big_size, -4, 4, shift) : c.input(dtype, big_size, -4, 4, shift);
  Operand& small =
      adds ? c.input(dtype, small_size, -4, 4, shift) : c.output(dtype, small_size, shift);
  Operand& index =  // one below and one above what exists, too
      c.input(index_dtype, has_rows ? s.count : small_size, -1, static_cast<double>(s.n));
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    (k.*which)({.big = big.at(side),
                .small = small.at(side),
                .index = index.at(side),
                .outer = s.outer,
                .n = s.n,
                .inner = s.inner,
                .count = s.count,
                .dtype = dtype,
                .index_dtype = index_dtype},
               exec);
  });
  // One order, one rounding at each addition: exact.
  std::vector<double> sums;
  for (std::int64_t i = 0; i < big_size; ++i) sums.push_back(big.get(i));
  const double missing = is_floating(dtype) ? std::numeric_limits<double>::quiet_NaN() : 0;
  for (std::int64_t i = 0; i < small_size; ++i) {
    const auto row = static_cast<std::int64_t>(index.get(has_rows ? i / s.inner % s.count : i));
    const bool exists = row >= 0 && row < s.n;
    const std::int64_t at = (i / s.inner / s.count * s.n + row) * s.inner + i % s.inner;
    if (!adds) c.near(small, i, exists ? big.get(at) : missing, 0);
    if (!adds || !exists) continue;
    double& sum = sums[static_cast<std::size_t>(at)];
    sum = rounded_sum(dtype, sum, small.get(i));
  }
  for (std::int64_t i = 0; adds && i < big_size; ++i)
    c.near(big, i, sums[static_cast<std::size_t>(i)], 0);
  c.next();
}

const IndexSizes kIndexSizes[] = {{1, 5, 16, 9}, {2, 3, 7, 6},       {3, 4, 1, 5}, {1, 9, 300, 4},
                                  {3, 4, 6, 9},  {2, 5, 8, 7, true}, {1, 1, 1, 1}, {2, 3, 4, 0},
                                  {2, 3, 0, 4},  {2, 9, 33, 6, true}};

}  // namespace

TESSERA_CASE("index", "select and gather, every dtype; what is outside is NaN or 0") {
  for (const IndexKernel which : {&Kernels::index_select, &Kernels::gather})
    for (const DType dtype : kAll)
      for (const IndexSizes& s : kIndexSizes) check_index(c, which, dtype, s);
}

TESSERA_CASE("index", "additions in order, every dtype but boolean") {
  for (const IndexKernel which : {&Kernels::index_add, &Kernels::scatter_add})
    for (const DType dtype : {f32, bf16, f16, f64, i32, i64})
      for (const IndexSizes& s : kIndexSizes) check_index(c, which, dtype, s);
}

}  // namespace kernel_test
