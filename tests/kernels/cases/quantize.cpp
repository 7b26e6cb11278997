// Matrices as 8-bit floats: codes, transposed codes and scales are exactly what the contract says.
#include <cmath>
#include <vector>

#include "kernels/quantize.hpp"
#include "tests/kernels/bounded.hpp"

namespace kernel_test {
namespace {

// The least power of two that takes `most` to the largest number of `to`.
double float8_scale_of(double most, DType to) {
  if (std::isinf(most)) return NAN;
  double scale = 0x1p-126;
  while ((to == e4m3 ? 448 : 57344) * scale < most) scale *= 2;
  return scale;
}

// A matrix [rows, cols] of `x`, or its transpose: each of its codes and scales.
class QuantizedForm {
 public:
  QuantizedForm(Case& c, Scaling scaling, DType to, std::int64_t rows, std::int64_t cols)
      : codes(c.output(to, rows * cols)),
        scales(c.output(f32, scale_count(scaling, rows, cols))),
        rows_(rows),
        cols_(cols),
        scaling_(scaling) {}

  template <class Get>
  void check(Case& c, Get get, bool own_scales) const {
    const std::int64_t high = scaling_ == Scaling::rows     ? 1
                              : scaling_ == Scaling::blocks ? 128
                                                            : rows_;
    const std::int64_t wide = scaling_ == Scaling::tensor ? cols_ : 128;
    std::vector<bool> is_scale(static_cast<std::size_t>(scales.size()));
    for (std::int64_t row = 0; row < rows_; row += high)
      for (std::int64_t col = 0; col < cols_; col += wide) {
        const std::int64_t end_row = std::min(rows_, row + high),
                           end_col = std::min(cols_, col + wide);
        double most = 0;
        for (std::int64_t r = row; r < end_row; ++r)
          for (std::int64_t k = col; k < end_col; ++k)
            if (std::abs(get(r, k)) > most) most = std::abs(get(r, k));
        const double scale = float8_scale_of(most, codes.dtype());
        const std::int64_t at = scaling_ == Scaling::tensor ? 0
                                : scaling_ == Scaling::rows
                                    ? col / 128 * rows_ + row
                                    : row / 128 * ((cols_ + 511) / 512 * 4) + col / 128;
        is_scale[static_cast<std::size_t>(at)] = true;
        if (own_scales) c.near(scales, at, scale, 0);
        for (std::int64_t r = row; r < end_row; ++r)
          for (std::int64_t k = col; k < end_col; ++k) {
            const double x = get(r, k);
            c.near(codes, r * cols_ + k, std::isnan(x) ? NAN : rounded_to(codes.dtype(), x / scale),
                   0);
          }
      }
    for (std::int64_t i = 0; own_scales && i < scales.size(); ++i)
      if (!is_scale[static_cast<std::size_t>(i)]) c.near(scales, i, 0, 0);
  }

  Operand &codes, &scales;

 private:
  std::int64_t rows_, cols_;
  Scaling scaling_;
};

struct MatrixSizes {
  std::int64_t rows, cols;
};

void check_quantized(Case& c, const MatrixSizes& shape, DType dtype, DType to, Scaling scaling,
                     bool plain, bool transposed) {
  Operand& x = c.input(dtype, shape.rows * shape.cols, -3, 3);
  // Columns of different sizes, one of zeros; a NaN, at times an infinity.
  for (std::int64_t i = 0; i < x.size(); ++i)
    x.set(i, x.get(i) * std::exp2(static_cast<double>(i % shape.cols / 32 % 5 - 2)) *
                 (i % shape.cols == 17 ? 0 : 1));
  x.set(c.integer(0, x.size() - 1), NAN);
  if (c.integer(0, 3) == 0) x.set(c.integer(0, x.size() - 1), INFINITY);
  Operand& most = c.output(f32, amax_pieces(x.size()).count);
  const QuantizedForm codes(c, scaling, to, plain ? shape.rows : 0, shape.cols),
      turned(c, scaling, to, transposed ? shape.cols : 0, shape.rows);
  const bool shares = scaling == Scaling::tensor;
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    if (shares)
      k.amax({.most = most.at<float>(side), .x = x.at(side), .count = x.size(), .dtype = dtype},
             exec);
    k.quantize({.codes = plain ? codes.codes.at(side) : nullptr,
                .transposed = transposed ? turned.codes.at(side) : nullptr,
                .scales = codes.scales.at<float>(side),
                .transposed_scales = turned.scales.at<float>(side),
                .x = x.at(side),
                .most = most.at<float>(side),
                .rows = shape.rows,
                .cols = shape.cols,
                .dtype = dtype,
                .to = to,
                .scaling = scaling},
               exec);
  });
  const auto element = [&](std::int64_t r, std::int64_t k) { return x.get(r * shape.cols + k); };
  if (plain) codes.check(c, element, true);
  if (transposed)
    turned.check(c, [&](std::int64_t r, std::int64_t k) { return element(k, r); }, !shares);
  c.next();
}

}  // namespace

TESSERA_CASE("quantize", "each form of a matrix, with the scales of each of its parts") {
  for (const DType dtype : {f32, bf16, f16})
    for (const DType to : {e4m3, e5m2})
      for (const Scaling scaling : {Scaling::tensor, Scaling::rows, Scaling::blocks})
        for (const MatrixSizes& shape : {MatrixSizes{16, 16}, MatrixSizes{144, 272}})
          check_quantized(c, shape, dtype, to, scaling, true, true);
}

TESSERA_CASE("quantize", "one form alone, and rows that 16 does not divide") {
  for (const Scaling scaling : {Scaling::tensor, Scaling::rows, Scaling::blocks}) {
    check_quantized(c, {131, 48}, bf16, e4m3, scaling, true, false);
    check_quantized(c, {1, 16}, f32, e5m2, scaling, true, false);
    check_quantized(c, {48, 560}, bf16, e4m3, scaling, false, true);
  }
}

TESSERA_CASE("quantize", "a large matrix has several pieces of magnitudes") {
  check_quantized(c, {c.integer(10, 12) * 16, 512}, bf16, e4m3, Scaling::tensor, true, true);
}

}  // namespace kernel_test
