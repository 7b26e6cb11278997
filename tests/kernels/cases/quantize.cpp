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

Quantized quantized(const QuantizedForm& codes, const QuantizedForm& turned, Side side,
                    const MatrixSizes& shape, DType dtype, DType to, Scaling scaling, bool plain,
                    bool transposed, const Operand& most) {
  return {.codes = plain ? codes.codes.at(side) : nullptr,
          .transposed = transposed ? turned.codes.at(side) : nullptr,
          .scales = codes.scales.at<float>(side),
          .transposed_scales = turned.scales.at<float>(side),
          .most = most.at<float>(side),
          .rows = shape.rows,
          .cols = shape.cols,
          .pieces = static_cast<std::int32_t>(most.size()),
          .dtype = dtype,
          .to = to,
          .scaling = scaling};
}

// The largest of the pieces is that of all elements; a NaN is none.
template <class Get>
void check_most(Case& c, const Operand& most, const MatrixSizes& shape, Get get) {
  double largest = 0;
  for (std::int64_t r = 0; r < shape.rows; ++r)
    for (std::int64_t k = 0; k < shape.cols; ++k)
      if (std::abs(get(r, k)) > largest) largest = std::abs(get(r, k));
  std::int64_t at = 0;
  for (std::int64_t p = 0; p < most.size(); ++p)
    if (!(c.on_device(most, p) <= c.on_device(most, at))) at = p;
  c.near(most, at, largest, 0);
}

void check_quantized(Case& c, const MatrixSizes& shape, DType dtype, DType to, Scaling scaling,
                     bool plain, bool transposed, bool has_all_sizes = false) {
  Operand& x = c.input(dtype, shape.rows * shape.cols, -3, 3);
  // Columns of different sizes, one of zeros, or elements of all sizes, subnormal ones too; some
  // are larger than all about them; a NaN, at times an infinity.
  for (std::int64_t i = 0; i < x.size(); ++i) {
    const auto size = has_all_sizes ? c.integer(-40, 8) : i % shape.cols / 32 % 5 - 2;
    x.set(i, x.get(i) * std::exp2(static_cast<double>(size)) *
                 (i % shape.cols == 17    ? 0
                  : c.integer(0, 49) == 0 ? 8
                                          : 1));
  }
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
    k.quantize({quantized(codes, turned, side, shape, dtype, to, scaling, plain, transposed, most),
                x.at(side)},
               exec);
  });
  const auto element = [&](std::int64_t r, std::int64_t k) { return x.get(r * shape.cols + k); };
  if (shares) check_most(c, most, shape, element);
  if (plain) codes.check(c, element, true);
  if (transposed)
    turned.check(c, [&](std::int64_t r, std::int64_t k) { return element(k, r); }, !shares);
  c.next();
}

// x = (input - mean) rstd weight + bias and silu(gate) up, of numbers for which f32 is exact in any
// order of operations: few bits, powers of two, and gates whose sigmoid is 0 or 1.
struct MadeMatrix {
  MadeMatrix(Case& c, DType dtype, const MatrixSizes& shape, bool from_norm, bool shifts)
      : from_norm_(from_norm), shifts_(shifts), cols_(shape.cols), stride(2 * shape.cols) {
    const std::int64_t n = shape.rows * shape.cols;
    first = &c.input(dtype, from_norm ? n : shape.rows * stride);
    second = &c.input(dtype, from_norm ? shape.cols : n);
    bias = &c.input(dtype, shape.cols);
    mean = &c.input(f32, shape.rows);
    rstd = &c.input(f32, shape.rows);
    fill(c, *first, [&] { return from_norm ? quarter(c) : gate(c); });
    fill(c, *second, [&] { return from_norm ? power(c) : quarter(c); });
    fill(c, *bias, [&] { return quarter(c); });
    fill(c, *mean, [&] { return quarter(c); });
    fill(c, *rstd, [&] { return power(c); });
    // One is larger than all others, wherever it is.
    const std::int64_t r = c.integer(0, shape.rows - 1), k = c.integer(0, shape.cols - 1);
    if (from_norm) {
      first->set(r * shape.cols + k, 256);
      rstd->set(r, 4);
    } else {
      first->set(r * stride + k, 128);
      second->set(r * shape.cols + k, -16);
    }
  }
  double get(std::int64_t r, std::int64_t k) const {
    if (!from_norm_) {
      const double g = first->get(r * stride + k), u = second->get(r * cols_ + k);
      return rounded_to(first->dtype(), g > 0 ? g * u : 0);
    }
    const double centered = first->get(r * cols_ + k) - (shifts_ ? mean->get(r) : 0);
    return rounded_to(first->dtype(),
                      centered * rstd->get(r) * second->get(k) + (shifts_ ? bias->get(k) : 0));
  }
  void quantize(const Kernels& k, Side side, Exec& exec, const Quantized& out, float* most) const {
    if (from_norm_) {
      k.quantize_norm({.out = out,
                       .input = first->at(side),
                       .weight = second->at(side),
                       .bias = shifts_ ? bias->at(side) : nullptr,
                       .mean = shifts_ ? mean->at<float>(side) : nullptr,
                       .rstd = rstd->at<float>(side)},
                      exec);
      return;
    }
    if (out.scaling == Scaling::tensor)
      k.amax_swiglu({.most = most,
                     .gate = first->at(side),
                     .up = second->at(side),
                     .rows = out.rows,
                     .cols = out.cols,
                     .gate_stride = stride,
                     .up_stride = out.cols,
                     .dtype = out.dtype},
                    exec);
    k.quantize_swiglu({.out = out,
                       .gate = first->at(side),
                       .up = second->at(side),
                       .gate_stride = stride,
                       .up_stride = out.cols},
                      exec);
  }

  Operand *first, *second, *bias, *mean, *rstd;

 private:
  template <class F>
  static void fill(Case&, Operand& x, F f) {
    for (std::int64_t i = 0; i < x.size(); ++i) x.set(i, f());
  }
  static double quarter(Case& c) { return static_cast<double>(c.integer(-8, 8)) / 4; }
  static double power(Case& c) { return std::exp2(static_cast<double>(c.integer(-2, 2))); }
  static double gate(Case& c) {
    constexpr double kGates[] = {-1024, 0, 64, 96, 128};
    return kGates[c.integer(0, 4)];
  }

  bool from_norm_, shifts_;
  std::int64_t cols_;

 public:
  std::int64_t stride;
};

void check_made(Case& c, const MatrixSizes& shape, DType dtype, Scaling scaling, bool from_norm,
                bool shifts, bool plain, bool transposed) {
  const MadeMatrix x(c, dtype, shape, from_norm, shifts);
  // What a norm says of it, many pieces, of which all but one are empty.
  double largest = 0;
  for (std::int64_t r = 0; r < shape.rows; ++r)
    for (std::int64_t k = 0; k < shape.cols; ++k)
      largest = std::max(largest, std::abs(x.get(r, k)));
  Operand& said = c.input(f32, 700, 0, 0);
  said.set(c.integer(0, said.size() - 1), largest);
  Operand& found = c.output(f32, amax_pieces(shape.rows * shape.cols).count);
  Operand& most = from_norm ? said : found;
  const QuantizedForm codes(c, scaling, e4m3, plain ? shape.rows : 0, shape.cols),
      turned(c, scaling, e4m3, transposed ? shape.cols : 0, shape.rows);
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    x.quantize(k, side, exec,
               quantized(codes, turned, side, shape, dtype, e4m3, scaling, plain, transposed, most),
               most.at<float>(side));
  });
  const auto element = [&](std::int64_t r, std::int64_t k) { return x.get(r, k); };
  if (!from_norm && scaling == Scaling::tensor) check_most(c, most, shape, element);
  if (plain) codes.check(c, element, true);
  if (transposed)
    turned.check(
        c, [&](std::int64_t r, std::int64_t k) { return element(k, r); },
        scaling != Scaling::tensor);
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

TESSERA_CASE("quantize", "what a norm would have written, in both forms") {
  for (const DType dtype : {f32, bf16, f16})
    for (const Scaling scaling : {Scaling::tensor, Scaling::rows})
      for (const bool shifts : {false, true}) {
        check_made(c, {144, 272}, dtype, scaling, true, shifts, true, true);
        check_made(c, {131, 48}, dtype, scaling, true, shifts, true, false);
        check_made(c, {16, 16}, dtype, scaling, true, shifts, false, true);
      }
}

TESSERA_CASE("quantize", "what SwiGLU would have written, of rows at different strides") {
  for (const DType dtype : {f32, bf16, f16})
    for (const Scaling scaling : {Scaling::tensor, Scaling::rows}) {
      check_made(c, {144, 272}, dtype, scaling, false, false, true, true);
      check_made(c, {131, 48}, dtype, scaling, false, false, true, false);
      check_made(c, {16, 16}, dtype, scaling, false, false, false, true);
    }
}

TESSERA_CASE("quantize", "one form alone, and rows that 16 does not divide") {
  for (const Scaling scaling : {Scaling::tensor, Scaling::rows, Scaling::blocks}) {
    check_quantized(c, {131, 48}, bf16, e4m3, scaling, true, false);
    check_quantized(c, {1, 16}, f32, e5m2, scaling, true, false);
    check_quantized(c, {48, 560}, bf16, e4m3, scaling, false, true);
  }
}

TESSERA_CASE("quantize",
             "elements of all sizes, those too that lie below the codes' normal range") {
  for (const DType dtype : {f32, bf16, f16})
    for (const DType to : {e4m3, e5m2})
      for (const Scaling scaling : {Scaling::tensor, Scaling::rows, Scaling::blocks})
        check_quantized(c, {144, 272}, dtype, to, scaling, true, true, true);
}

TESSERA_CASE("quantize", "a large matrix has several pieces of magnitudes") {
  check_quantized(c, {c.integer(10, 12) * 16, 512}, bf16, e4m3, Scaling::tensor, true, true);
}

}  // namespace kernel_test
