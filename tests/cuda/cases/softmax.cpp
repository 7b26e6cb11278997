// Softmax and its derivative: rows that fit registers and rows that do not, in place, with values
// that no exponential holds.
#include <cmath>
#include <limits>

#include "tests/cuda/case.hpp"

using namespace cuda_test;

namespace {

constexpr DType kFloats[] = {f32, bf16, f16, f64};

double round_error(DType dtype) { return epsilon(dtype == f64 ? f64 : f32); }

// Relative error of a row's sum of exponentials between host and device: 3 roundings of exp on each
// side (CUDA's expf is within 2 ulp, exp within 1), that of the argument, which is at most `reach`
// long, and the additions, a thread's chain and a tree.
double sum_error(std::int64_t cols, double reach, DType dtype) {
  return (2 * (3 + reach) + 32 + static_cast<double>(cols) / 256 + 13 + 60) * round_error(dtype);
}

struct Setup {
  std::int64_t rows, cols;
  bool shifted = false;
};

void check(Case& c, const Setup& s, DType dtype, bool in_place) {
  const std::int64_t n = s.rows * s.cols,
                     shift = s.shifted ? static_cast<std::int64_t>(size_bytes(dtype)) : 0;
  Operand& x = in_place ? c.updated(dtype, n, -8, 8, shift) : c.input(dtype, n, -8, 8, shift);
  Operand& y = in_place ? x : c.output(dtype, n, shift);
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    k.softmax({.y = y.at(side), .x = x.at(side), .rows = s.rows, .cols = s.cols, .dtype = dtype},
              exec);
  });
  // A 16-bit result may round to the other side; f16 has a coarsest step of 2^-24.
  c.close(y, 2 * epsilon(dtype) + 2 * sum_error(s.cols, 16, dtype), dtype == f16 ? 0x1p-24 : 0);
}

void check_backward(Case& c, const Setup& s, DType dtype, int in_place) {
  const std::int64_t n = s.rows * s.cols,
                     shift = s.shifted ? static_cast<std::int64_t>(size_bytes(dtype)) : 0;
  const double high = 2.0 / static_cast<double>(s.cols);
  Operand& y = in_place == 1 ? c.updated(dtype, n, 0, high) : c.input(dtype, n, 0, high);
  Operand& dy = in_place == 2 ? c.updated(dtype, n) : c.input(dtype, n, -2, 2, shift);
  Operand& dx = in_place == 1 ? y : in_place == 2 ? dy : c.output(dtype, n);
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    k.softmax_backward({.dx = dx.at(side),
                        .y = y.at(side),
                        .dy = dy.at(side),
                        .rows = s.rows,
                        .cols = s.cols,
                        .dtype = dtype},
                       exec);
  });
  // The dot sums at most 2 high cols = 4, so the bracket is within 6, each off by the sum's error.
  c.close(dx, 2 * epsilon(dtype),
          high * 6 * 2 * sum_error(s.cols, 0, dtype) + (dtype == f16 ? 0x1p-24 : 0));
}

}  // namespace

TESSERA_CASE("softmax", "rows of any length") {
  for (const DType dtype : kFloats) {
    const std::int64_t pack = 16 / static_cast<std::int64_t>(size_bytes(dtype));
    for (const Setup& s : {Setup{1, 1},
                           {3, pack - 1},
                           {9, pack},
                           {13, 96},
                           {5, 1024 + pack},
                           {2, 8192},
                           {2, 8192 + pack},
                           {2, 1021},
                           {3, 64, true}}) {
      check(c, s, dtype, false);
      check_backward(c, s, dtype, 0);
    }
  }
}

TESSERA_CASE("softmax", "in place") {
  for (const DType dtype : kFloats)
    for (const Setup& s : {Setup{3, 128}, {2, 8208}, {3, 131}}) {
      check(c, s, dtype, true);
      check_backward(c, s, dtype, 1);
      check_backward(c, s, dtype, 2);
    }
}

// Rows of -inf and with +inf or NaN are NaN; -inf alone is a 0, however large the others are.
TESSERA_CASE("softmax", "special values") {
  constexpr double inf = std::numeric_limits<double>::infinity();
  for (const DType dtype : kFloats)
    for (const std::int64_t cols : {64, 67}) {
      Operand &x = c.input(dtype, 5 * cols), &y = c.output(dtype, 5 * cols);
      for (std::int64_t i = 0; i < cols; ++i) x.set(i, -inf);
      x.set(cols + 3, std::numeric_limits<double>::quiet_NaN());
      x.set(2 * cols + 5, inf);
      for (std::int64_t i = 0; i + 1 < cols; ++i) x.set(3 * cols + i, -inf);
      x.set(4 * cols, -60000);
      x.set(4 * cols + 1, 60000);
      c.run([&](const Kernels& k, Side side, Exec& exec) {
        k.softmax({.y = y.at(side), .x = x.at(side), .rows = 5, .cols = cols, .dtype = dtype},
                  exec);
      });
      c.close(y, 2 * epsilon(dtype), 0);
    }
}
