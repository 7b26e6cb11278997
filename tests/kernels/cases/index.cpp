// Indexing along a dimension: rows of one index and elements of their own, additions in order.
#include <cmath>
#include <limits>

#include "tests/kernels/ordered.hpp"

namespace kernel_test {
namespace {

struct IndexSizes {
  std::int64_t outer, n, inner, count;
  bool shifted = false;
};

using IndexKernel = Kernel<IndexArgs> Kernels::*;

void check_index(Case& c, IndexKernel which, DType dtype, const IndexSizes& s) {
  const bool sets = which == &Kernels::scatter,
             writes_big = sets || which == &Kernels::index_add || which == &Kernels::scatter_add,
             has_rows = which == &Kernels::index_select || which == &Kernels::index_add;
  const std::int64_t big_size = s.outer * s.n * s.inner, small_size = s.outer * s.count * s.inner,
                     shift = shift_of(dtype, s.shifted);
  const bool adds_rows = which == &Kernels::index_add;
  const DType index_dtype = c.integer(0, 1) == 1 ? i32 : i64;
  Operand& big = writes_big ? c.updated(dtype, big_size, -4, 4, shift)
                            : c.input(dtype, big_size, -4, 4, shift);
  Operand& small =
      writes_big ? c.input(dtype, small_size, -4, 4, shift) : c.output(dtype, small_size, shift);
  Operand& index =  // one below and one above what exists, too
      c.input(index_dtype, has_rows ? s.count : small_size, -1, static_cast<double>(s.n));
  if (adds_rows)  // in an order of the device's own: whole numbers, whose sums do not round
    for (Operand* x : {&big, &small})
      for (std::int64_t i = 0; i < x->size(); ++i) x->set(i, std::round(x->get(i)));
  const ById by_id(c, has_rows ? s.count : 0,
                   adds_rows ? sums_workspace_bytes(s.outer, s.count, s.inner, dtype, dtype) : 0);
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    if (adds_rows) by_id.find_order(k, side, exec, index, s.n);
    (k.*which)({.big = big.at(side),
                .small = small.at(side),
                .index = index.at(side),
                .outer = s.outer,
                .n = s.n,
                .inner = s.inner,
                .count = s.count,
                .dtype = dtype,
                .index_dtype = index_dtype,
                .order = by_id.order.at<std::int32_t>(side),
                .workspace = by_id.workspace.at(side)},
               exec);
  });
  // One order, one rounding at each addition, or none: exact.
  std::vector<double> sums;
  for (std::int64_t i = 0; i < big_size; ++i) sums.push_back(big.get(i));
  const double missing = is_floating(dtype) ? std::numeric_limits<double>::quiet_NaN() : 0;
  for (std::int64_t i = 0; i < small_size; ++i) {
    const auto row = static_cast<std::int64_t>(index.get(has_rows ? i / s.inner % s.count : i));
    const bool exists = row >= 0 && row < s.n;
    const std::int64_t at = (i / s.inner / s.count * s.n + row) * s.inner + i % s.inner;
    if (!writes_big) c.near(small, i, exists ? big.get(at) : missing, 0);
    if (!writes_big || !exists) continue;
    double& sum = sums[static_cast<std::size_t>(at)];
    sum = sets ? small.get(i) : rounded_sum(dtype, sum, small.get(i));
  }
  for (std::int64_t i = 0; writes_big && i < big_size; ++i)
    c.near(big, i, sums[static_cast<std::size_t>(i)], 0);
  c.next();
}

const IndexSizes kIndexSizes[] = {{1, 5, 16, 9}, {2, 3, 7, 6},       {3, 4, 1, 5}, {1, 9, 300, 4},
                                  {3, 4, 6, 9},  {2, 5, 8, 7, true}, {1, 1, 1, 1}, {2, 3, 4, 0},
                                  {2, 3, 0, 4},  {2, 9, 33, 6, true}};

}  // namespace

TESSERA_CASE("index", "select and gather, every dtype; what is outside is NaN or 0") {
  for (const IndexKernel which : {&Kernels::index_select, &Kernels::gather})
    for (const IndexSizes& s : kIndexSizes) {
      for (const DType dtype : kAll) check_index(c, which, dtype, s);
      check_index(c, which, u8, s);
    }
}

TESSERA_CASE("index", "additions in order, every dtype but boolean") {
  for (const IndexKernel which : {&Kernels::index_add, &Kernels::scatter_add})
    for (const DType dtype : {f32, bf16, f16, f64, i32, i64})
      for (const IndexSizes& s : kIndexSizes) check_index(c, which, dtype, s);
  for (const DType dtype : {f32, f16, f64, i32, i64})
    check_index(c, &Kernels::index_add, dtype, {2, 3, 8, 300});  // five pieces
}

TESSERA_CASE("index", "elements set, every dtype; the last of several at one place stays") {
  for (const DType dtype : kAll)
    for (const IndexSizes& s : kIndexSizes) check_index(c, &Kernels::scatter, dtype, s);
}

}  // namespace kernel_test
