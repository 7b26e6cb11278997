#include "tests/cuda/case.hpp"

using namespace cuda_test;

namespace {

struct Sizes {
  std::int64_t outer, n, inner, count;
  std::int64_t shift = 0;
};

using Which = Kernel<IndexArgs> Kernels::*;

void check(Case& c, Which which, DType dtype, DType index_dtype, const Sizes& s) {
  const bool adds = which == &Kernels::index_add || which == &Kernels::scatter_add,
             has_rows = which == &Kernels::index_select || which == &Kernels::index_add;
  const std::int64_t big_size = s.outer * s.n * s.inner, small_size = s.outer * s.count * s.inner,
                     bytes = s.shift * static_cast<std::int64_t>(size_bytes(dtype));
  Operand& big =
      adds ? c.updated(dtype, big_size, -4, 4, bytes) : c.input(dtype, big_size, -4, 4, bytes);
  Operand& small =
      adds ? c.input(dtype, small_size, -4, 4, bytes) : c.output(dtype, small_size, bytes);
  Operand& index =
      c.input(index_dtype, has_rows ? s.count : small_size, -1, static_cast<double>(s.n));
  c.run([&](const Kernels& k, Side side, Exec& exec) {
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
  // One order, one rounding at each addition: the same bits.
  c.equal(adds ? big : small);
}

const Sizes kSizes[] = {{1, 5, 16, 9},   {2, 3, 7, 6}, {3, 4, 1, 5}, {1, 9, 300, 4},
                        {2, 5, 8, 7, 1}, {1, 1, 1, 1}, {2, 3, 4, 0}, {2, 3, 0, 4}};

}  // namespace

TESSERA_CASE("index", "select and gather, every dtype") {
  for (const Which which : {&Kernels::index_select, &Kernels::gather})
    for (const DType dtype : {f32, bf16, f16, f64, i32, i64, boolean})
      for (const Sizes& s : kSizes) check(c, which, dtype, dtype == f32 ? i32 : i64, s);
}

TESSERA_CASE("index", "additions in order, every dtype but boolean") {
  for (const Which which : {&Kernels::index_add, &Kernels::scatter_add})
    for (const DType dtype : {f32, bf16, f16, f64, i32, i64})
      for (const Sizes& s : kSizes) check(c, which, dtype, dtype == f32 ? i32 : i64, s);
}
