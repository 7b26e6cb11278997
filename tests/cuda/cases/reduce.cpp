// Reductions: rows and columns of any length, all types, the first of equal values, NaN.
#include <cmath>
#include <limits>

#include "tests/cuda/case.hpp"

using namespace cuda_test;

namespace {

constexpr DType kAll[] = {f32, bf16, f16, f64, i32, i64, boolean};

struct Setup {
  std::int64_t outer, n, inner;
  bool shifted = false;
};

void check(Case& c, const Setup& s, ReduceOp op, DType dtype, DType out_dtype) {
  const std::int64_t shift = s.shifted ? static_cast<std::int64_t>(size_bytes(dtype)) : 0;
  Operand& in = c.input(dtype, s.outer * s.n * s.inner, -2, 2, shift);
  Operand& out = c.output(out_dtype, s.outer * s.inner);
  if (op != ReduceOp::sum && in.size() > 9 && is_floating(dtype))
    in.set(9, std::numeric_limits<double>::quiet_NaN());
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    k.reduce({.out = out.at(side),
              .in = in.at(side),
              .outer = s.outer,
              .n = s.n,
              .inner = s.inner,
              .op = op,
              .dtype = dtype,
              .out_dtype = out_dtype},
             exec);
  });
  const bool sums = op == ReduceOp::sum || op == ReduceOp::mean || op == ReduceOp::sumsq;
  if (!is_floating(dtype) || !sums) return c.equal(out);
  // Of terms of at most 4: a thread's chain, 64 elements or (without a workspace) a share of the
  // row, and trees on the device; 40 and the logarithm on the host.
  const double n = static_cast<double>(s.n), chain = 64 + n / 8,
               u = epsilon(dtype == f64 ? f64 : f32);
  const double magnitude = op == ReduceOp::mean ? 2 : op == ReduceOp::sum ? 2 * n : 4 * n;
  c.close(out, 2 * epsilon(out_dtype), (chain + 100) * u * magnitude);
}

}  // namespace

TESSERA_CASE("reduce", "sums of rows and columns") {
  for (const DType dtype : kAll)
    for (const Setup& s : {Setup{1, 1, 1},
                           {3, 7, 1},
                           {9, 64, 1},
                           {5, 1031, 1},
                           {2, 16384 + 17, 1},
                           {2, 33, 1, true},
                           {2, 5, 3},
                           {1, 300, 64},
                           {3, 40, 257},
                           {2, 9, 32, true},
                           {3, 0, 1},
                           {2, 0, 5}}) {
      check(c, s, ReduceOp::sum, dtype, is_floating(dtype) ? dtype : i64);
      if (is_floating(dtype)) {
        check(c, s, ReduceOp::mean, dtype, dtype == f64 ? f64 : f32);
        check(c, s, ReduceOp::sumsq, dtype, dtype);
      }
    }
}

TESSERA_CASE("reduce", "maxima, minima and their places") {
  for (const DType dtype : kAll)
    for (const Setup& s : {Setup{1, 1, 1},
                           {3, 7, 1},
                           {4, 600, 1},
                           {2, 33, 1, true},
                           {2, 5, 3},
                           {3, 11, 130},
                           {3, 0, 1},
                           {2, 0, 5}}) {
      check(c, s, ReduceOp::max, dtype, dtype);
      check(c, s, ReduceOp::min, dtype, dtype);
      check(c, s, ReduceOp::argmax, dtype, i64);
    }
}

TESSERA_CASE("reduce", "sum of squares in double precision") {
  for (const DType out_dtype : {f32, f64})
    for (const std::int64_t count : {0, 1, 1000, 16384, 40003})
      for (const bool accumulate : {false, true}) {
        Operand &in = c.input(f32, count, -2, 2, 4), &out = c.updated(out_dtype, 1);
        c.run([&](const Kernels& k, Side side, Exec& exec) {
          k.sumsq_flat({.out = out.at(side),
                        .in = in.at<const float>(side),
                        .count = count,
                        .out_dtype = out_dtype,
                        .accumulate = accumulate},
                       exec);
        });
        // Terms are exact in f64 and positive; chains of count / 256 on the device, count / 16 on
        // the host; one rounding to f32.
        c.close(out, 2 * epsilon(out_dtype) + static_cast<double>(count) * 0x1p-53, 0x1p-40);
      }
}
