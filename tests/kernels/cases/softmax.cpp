// Softmax and its derivative: rows that fit registers and rows that do not, in place, with values
// that no exponential holds.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/kernels/bounded.hpp"

using namespace kernel_test;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double round_error(DType dtype) { return epsilon(dtype == f64 ? f64 : f32); }

// Relative error of a row's sum of exponentials: 3 roundings of exp (CUDA's expf is within 2 ulp,
// exp within 1; the host's vectors within 3), that of the argument, which is at most `reach` long,
// and the additions: a thread's chain and a tree, or the blocks of the host.
double sum_error(std::int64_t cols, double reach, DType dtype) {
  return (3 + reach + 32 + static_cast<double>(cols) / 256 + 13 + 60) * round_error(dtype);
}

struct Setup {
  std::int64_t rows, cols;
  bool shifted = false;
};

std::vector<double> softmax_of(const Operand& x, std::int64_t begin, std::int64_t cols) {
  double top = -kInf, total = 0;
  for (std::int64_t i = 0; i < cols; ++i) top = std::max(top, x.get(begin + i));
  std::vector<double> p;
  for (std::int64_t i = 0; i < cols; ++i) p.push_back(std::exp(x.get(begin + i) - top));
  for (const double v : p) total += v;
  for (double& v : p) v /= total;
  return p;
}

// An exponential, whose argument is at most 20 long, over their sum, rounded to the dtype once.
void compare(Case& c, const Operand& x, const Operand& y, const Setup& s) {
  const double relative =
      epsilon(y.dtype()) + (20 + 4) * round_error(y.dtype()) + sum_error(s.cols, 20, y.dtype());
  for (std::int64_t r = 0; r < s.rows; ++r) {
    const std::vector<double> expected = softmax_of(x, r * s.cols, s.cols);
    for (std::int64_t i = 0; i < s.cols; ++i) {
      const double p = expected[static_cast<std::size_t>(i)];
      c.near(y, r * s.cols + i, p, p == 0 ? 0 : relative * p + smallest(y.dtype()));
    }
  }
}

void check(Case& c, const Setup& s, DType dtype, bool in_place) {
  const std::int64_t n = s.rows * s.cols,
                     shift = s.shifted ? static_cast<std::int64_t>(size_bytes(dtype)) : 0;
  Operand& x = in_place ? c.updated(dtype, n, -10, 10, shift) : c.input(dtype, n, -10, 10, shift);
  Operand& y = in_place ? x : c.output(dtype, n, shift);
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    k.softmax({.y = y.at(side), .x = x.at(side), .rows = s.rows, .cols = s.cols, .dtype = dtype},
              exec);
  });
  compare(c, x, y, s);
  c.next();
}

void check_backward(Case& c, const Setup& s, DType dtype, int in_place) {
  const std::int64_t n = s.rows * s.cols,
                     shift = s.shifted ? static_cast<std::int64_t>(size_bytes(dtype)) : 0;
  const double high = s.cols == 0 ? 0 : 2.0 / static_cast<double>(s.cols);
  Operand& y = in_place == 1 ? c.updated(dtype, n, 0, high) : c.input(dtype, n, 0, high);
  Operand& dy = in_place == 2 ? c.updated(dtype, n) : c.input(dtype, n, -2, 2, shift);
  Operand& dx = in_place == 1 ? y : in_place == 2 ? dy : c.output(dtype, n);
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    k.softmax_backward({.dx = dx.at(side),
                        .y = y.at(side),
                        .dy = dy.at(side),
                        .rows = s.rows,
                        .cols = s.cols,
                        .dtype = dtype},
                       exec);
  });
  // The dot sums at most 2 high cols = 4, so the bracket is within 6, each off by the sum's error.
  // y itself may be one rounding above `high`.
  const double absolute = 1.01 * high * 6 * sum_error(s.cols, 0, dtype) + smallest(dtype);
  for (std::int64_t r = 0; r < s.rows; ++r) {
    double dot = 0;
    for (std::int64_t i = r * s.cols; i < (r + 1) * s.cols; ++i) dot += y.get(i) * dy.get(i);
    for (std::int64_t i = r * s.cols; i < (r + 1) * s.cols; ++i) {
      const double expected = y.get(i) * (dy.get(i) - dot);
      c.near(dx, i, expected, epsilon(dtype) * std::abs(expected) + absolute);
    }
  }
  c.next();
}

}  // namespace

TESSERA_CASE("softmax", "rows of any length") {
  for (const DType dtype : kFloats) {
    const std::int64_t pack = 16 / static_cast<std::int64_t>(size_bytes(dtype));
    for (const Setup& s : {Setup{1, 1},
                           {0, 4},
                           {3, 7},
                           {3, pack - 1},
                           {9, pack},
                           {13, 96},
                           {300, 65},
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
    for (const Setup& s : {Setup{3, 128}, {2, 8208}, {3, 131}, {40, 700}}) {
      check(c, s, dtype, true);
      check_backward(c, s, dtype, 1);
      check_backward(c, s, dtype, 2);
    }
}

// Rows of -inf and with +inf or NaN are NaN; -inf alone is a 0, however large the others are.
TESSERA_CASE("softmax", "special values") {
  for (const DType dtype : kFloats)
    for (const std::int64_t cols : {20, 64, 67}) {
      Operand &x = c.input(dtype, 6 * cols), &y = c.output(dtype, 6 * cols);
      for (std::int64_t i = 0; i < cols; ++i) x.set(i, -kInf);
      x.set(cols + 3, std::numeric_limits<double>::quiet_NaN());
      x.set(2 * cols + 5, kInf);
      for (std::int64_t i = 0; i + 1 < cols; ++i) x.set(3 * cols + i, -kInf);
      x.set(4 * cols, -60000);
      x.set(4 * cols + 1, 60000);
      for (std::int64_t i = 0; i < cols; i += 3) x.set(5 * cols + i, -kInf);
      c.compute([&](const Kernels& k, Side side, Exec& exec) {
        k.softmax({.y = y.at(side), .x = x.at(side), .rows = 6, .cols = cols, .dtype = dtype},
                  exec);
      });
      compare(c, x, y, {6, cols});
      c.next();
    }
}
