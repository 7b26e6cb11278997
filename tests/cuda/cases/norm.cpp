// RMSNorm and LayerNorm: rows that fit registers and rows that do not, packs and single elements,
// with and without residual, parameters and their gradients.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/cuda/case.hpp"

using namespace cuda_test;

namespace {

constexpr DType kFloats[] = {f32, bf16, f16, f64};
// Bounds rstd by 1 / sqrt(kEps), so that no row is ill-conditioned.
constexpr double kEps = 0.1, kLargestRstd = 3.17;

DType statistics(DType dtype) { return dtype == f64 ? f64 : f32; }
double round_error(DType dtype) { return epsilon(statistics(dtype)); }

struct Setup {
  std::int64_t rows, cols;
  bool layer = false, affine = true, residual = false, shifted = false;
};

// Roundings that a row's statistic has seen: a thread's chain (32 elements, or a 256th of the row),
// two trees and a division on the device; blocks of 1024 by lanes and halves on the host.
double roundings(std::int64_t cols) { return 32 + static_cast<double>(cols) / 256 + 13 + 4 + 60; }

void check_forward(Case& c, const Setup& s, DType dtype) {
  const std::int64_t n = s.rows * s.cols;
  const auto size = static_cast<std::int64_t>(size_bytes(dtype)), shift = s.shifted ? size : 0;
  Operand &x = c.input(dtype, n, -2, 2, shift), &y = c.output(dtype, n, shift);
  Operand &rstd = c.output(statistics(dtype), s.rows), &mean = c.output(statistics(dtype), s.rows);
  Operand &residual = c.input(dtype, n, -2, 2, shift), &sum = c.output(dtype, n, shift);
  Operand &weight = c.input(dtype, s.cols), &bias = c.input(dtype, s.cols, -2, 2, shift);
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    if (s.layer)
      k.layer_norm({.y = y.at(side),
                    .mean = mean.at(side),
                    .rstd = rstd.at(side),
                    .x = x.at(side),
                    .weight = s.affine ? weight.at(side) : nullptr,
                    .bias = s.affine ? bias.at(side) : nullptr,
                    .rows = s.rows,
                    .cols = s.cols,
                    .eps = kEps,
                    .dtype = dtype,
                    .residual = s.residual ? residual.at(side) : nullptr,
                    .sum = s.residual ? sum.at(side) : nullptr},
                   exec);
    else
      k.rms_norm({.y = y.at(side),
                  .rstd = rstd.at(side),
                  .x = x.at(side),
                  .weight = s.affine ? weight.at(side) : nullptr,
                  .rows = s.rows,
                  .cols = s.cols,
                  .eps = kEps,
                  .dtype = dtype,
                  .residual = s.residual ? residual.at(side) : nullptr,
                  .sum = s.residual ? sum.at(side) : nullptr},
                 exec);
  });
  // A mean of values up to 4 is off by 4 u, which moves rstd by rstd u times 4 rstd at most; y is
  // (x - mean) rstd weight with |x - mean| <= 8 and |weight| <= 2.
  const double u = 2 * roundings(s.cols) * round_error(dtype), moved = 1 + 4 * kLargestRstd;
  if (s.residual) c.equal(sum);
  c.close(rstd, u * moved, 0);
  if (s.layer) c.close(mean, 0, 4 * u);
  c.close(y, 2 * epsilon(dtype), u * moved * 16 * kLargestRstd);
}

struct Wants {
  bool dx = true, d_weight = true, d_bias = true, d_sum = false, accumulate = false;
  bool in_place = false;  // dx is dy
};

void check_backward(Case& c, const Setup& s, const Wants& wants, DType dtype, DType grad_dtype) {
  const std::int64_t n = s.rows * s.cols;
  const auto size = static_cast<std::int64_t>(size_bytes(dtype)), shift = s.shifted ? size : 0;
  Operand& x = c.input(dtype, n, -2, 2, shift);
  Operand& dy = wants.in_place ? c.updated(dtype, n) : c.input(dtype, n);
  Operand& dx = wants.in_place ? dy : c.output(dtype, n);
  Operand &weight = c.input(dtype, s.cols), &d_sum = c.input(dtype, n);
  Operand &rstd = c.input(statistics(dtype), s.rows, 0.5, 1),
          &mean = c.input(statistics(dtype), s.rows, -0.5, 0.5);
  Operand &dw = c.updated(grad_dtype, s.cols), &db = c.updated(grad_dtype, s.cols);
  Operand& workspace =
      c.output(statistics(dtype),
               std::max<std::int64_t>(1, norm_blocks(s.rows) * s.cols *
                                             (int{wants.d_weight} + int{wants.d_bias && s.layer})));
  // dw sums |dy xhat|, with x and dy as they are before the run.
  double largest = 0;
  for (std::int64_t column = 0; column < s.cols; ++column) {
    double total = 0;
    for (std::int64_t r = 0; r < s.rows; ++r) {
      const double m = s.layer ? mean.get(r) : 0;
      total +=
          std::abs(dy.get(r * s.cols + column) * (x.get(r * s.cols + column) - m)) * rstd.get(r);
    }
    largest = std::max(largest, total);
  }
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    k.norm_backward({.dx = wants.dx ? dx.at(side) : nullptr,
                     .d_weight = wants.d_weight ? dw.at(side) : nullptr,
                     .d_bias = wants.d_bias && s.layer ? db.at(side) : nullptr,
                     .x = x.at(side),
                     .dy = dy.at(side),
                     .weight = s.affine ? weight.at(side) : nullptr,
                     .mean = s.layer ? mean.at(side) : nullptr,
                     .rstd = rstd.at(side),
                     .workspace = workspace.at(side),
                     .rows = s.rows,
                     .cols = static_cast<std::int32_t>(s.cols),
                     .scale = 0.5f,
                     .dtype = dtype,
                     .grad_dtype = grad_dtype,
                     .accumulate = wants.accumulate,
                     .d_sum = wants.d_sum ? d_sum.at(side) : nullptr},
                    exec);
  });
  // |g| <= 4, |xhat| <= 2.5, the mean of g xhat <= 10: the bracket of dx is at most 4 + 4 + 25, and
  // its rounding to dtype, where d_sum is added, at most that much times epsilon.
  const double u = 2 * roundings(s.cols) * round_error(dtype);
  if (wants.dx)
    c.close(dx, 2 * epsilon(dtype), u * 33 + (wants.d_sum ? 2 * 33 * epsilon(dtype) : 0));
  // Both sides add rows in chains of norm_block_rows or fewer, then at most 64 parts (host) or 264
  // over 8 warps, each of 8 groups (device).
  const double adds = static_cast<double>(norm_block_rows(s.rows)) + 64 + 60;
  if (wants.d_weight)
    c.close(dw, 2 * epsilon(grad_dtype), 2 * adds * round_error(dtype) * (largest + 2));
  if (wants.d_bias && s.layer)
    c.close(db, 2 * epsilon(grad_dtype),
            2 * adds * round_error(dtype) * 2 * static_cast<double>(s.rows + 2));
}

}  // namespace

TESSERA_CASE("norm", "forward, rows of any length") {
  for (const DType dtype : kFloats) {
    const std::int64_t pack = 16 / static_cast<std::int64_t>(size_bytes(dtype));
    for (const bool layer : {false, true}) {
      check_forward(c, {1, 1, layer}, dtype);
      check_forward(c, {3, pack - 1, layer, false}, dtype);
      check_forward(c, {9, pack, layer}, dtype);
      check_forward(c, {13, 96, layer, true, true}, dtype);
      check_forward(c, {5, 1024 + pack, layer, false, true}, dtype);
      check_forward(c, {3, 8192, layer, true, layer}, dtype);
      check_forward(c, {2, 8192 + pack, layer, true, !layer}, dtype);
      check_forward(c, {2, 1021, layer, true, true}, dtype);
      check_forward(c, {3, 64, layer, true, true, true}, dtype);
    }
  }
}

TESSERA_CASE("norm", "backward, rows of any length") {
  for (const DType dtype : kFloats) {
    const std::int64_t pack = 16 / static_cast<std::int64_t>(size_bytes(dtype));
    for (const bool layer : {false, true}) {
      check_backward(c, {1, 1, layer}, {}, dtype, dtype);
      check_backward(c, {3, pack - 1, layer, false}, {.d_sum = true}, dtype, dtype);
      check_backward(c, {9, pack, layer}, {.accumulate = true}, dtype, statistics(dtype));
      check_backward(c, {100, 96, layer}, {.d_sum = true}, dtype, statistics(dtype));
      check_backward(c, {19, 520, layer}, {.d_sum = !layer, .in_place = true}, dtype, dtype);
      check_backward(c, {2, 4096, layer}, {.d_sum = layer}, dtype, dtype);
      check_backward(c, {2, 4096 + pack, layer}, {}, dtype, dtype);
      check_backward(c, {1, 8192 + pack, layer}, {}, dtype, dtype);
      check_backward(c, {40, 61, layer}, {.accumulate = true, .in_place = true}, dtype, dtype);
      check_backward(c, {5, 64, layer, true, false, true}, {.d_sum = true}, dtype, dtype);
    }
  }
}

// More rows than all groups of a launch have.
TESSERA_CASE("norm", "backward, many rows") {
  for (const bool layer : {false, true}) {
    check_backward(c, {2 * 264 * 8 + 5, 8, layer}, {.accumulate = true}, bf16, f32);
    check_backward(c, {600, 3, layer}, {}, f32, f32);
  }
  check_backward(c, {0, 16, true}, {.accumulate = true}, f32, f32);
}

TESSERA_CASE("norm", "backward writes what is asked for") {
  for (const DType dtype : {bf16, f64}) {
    check_backward(c, {7, 40, true}, {.d_weight = false, .d_bias = false}, dtype, dtype);
    check_backward(c, {7, 40, true}, {.dx = false, .d_weight = false}, dtype, dtype);
    check_backward(c, {7, 40, true}, {.dx = false, .d_bias = false}, dtype, dtype);
    check_backward(c, {7, 40, false}, {.dx = false}, dtype, dtype);
  }
}

// NaN and infinity stay in their row; y may be x.
TESSERA_CASE("norm", "special values, in place") {
  const std::int64_t cols = 72;
  Operand &x = c.updated(f32, 3 * cols), &rstd = c.output(f32, 3);
  x.set(5, std::numeric_limits<double>::quiet_NaN());
  x.set(cols + 7, std::numeric_limits<double>::infinity());
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    k.rms_norm({.y = x.at(side),
                .rstd = rstd.at(side),
                .x = x.at(side),
                .weight = nullptr,
                .rows = 3,
                .cols = cols,
                .eps = kEps,
                .dtype = f32},
               exec);
  });
  c.close(rstd, 2 * roundings(cols) * epsilon(f32), 0);
  c.close(x, 4 * roundings(cols) * epsilon(f32), 0);
}
