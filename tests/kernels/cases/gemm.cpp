// Matrix products of every orientation, dtype and alignment, and those with GELU.
#include <array>

#include "kernels/formulas.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tests/kernels/bounded.hpp"
#include "tests/kernels/strided.hpp"

namespace kernel_test {
namespace {

struct Product {
  DType dtype, c_dtype;
  std::int32_t batch, m, n, k;
  bool trans_a, trans_b, bias;
  double alpha, beta;
  std::int32_t gap = 0;          // elements between rows, and between matrices
  std::int64_t shift_bytes = 0;  // of all operands
  bool tf32 = false, one_b = false;
  bool c0 = false;  // C0 is an operand of its own
};

// A matrix of `rows` x `cols` in rows `ld` apart, `batch` of them `stride` apart; NaN between them.
Operand& matrices(Case& c, const Product& p, std::int32_t batch, std::int64_t stride,
                  std::int32_t rows, std::int32_t cols, std::int32_t ld) {
  Operand& x = c.input(p.dtype, batch * stride, -1, 1, p.shift_bytes);
  for (std::int64_t i = 0; i < x.size(); ++i)
    if (i % stride % ld >= cols || i % stride / ld >= rows)
      x.set(i, std::numeric_limits<double>::quiet_NaN());
  return x;
}

// An element of alpha op(A) op(B), and the sum of its terms' magnitudes.
struct Term {
  double sum = 0, magnitude = 0;
};

class Factors {
 public:
  Factors(Case& c, const Product& p)
      : Factors(c, p, p.trans_a ? p.k : p.m, p.trans_a ? p.m : p.k, p.trans_b ? p.n : p.k,
                p.trans_b ? p.k : p.n) {}

  GemmArgs at(Side side) const {
    GemmArgs out = args_;
    out.a = a_.at(side);
    out.b = b_.at(side);
    out.bias = has_bias_ ? bias_.at(side) : nullptr;
    return out;
  }
  double bias(std::int64_t column) const { return has_bias_ ? bias_.get(column) : 0; }

  // Elements of [batch, m, n], in this order.
  std::vector<Term> products() const {
    const std::vector<double> a = contents(a_), b = contents(b_);
    const auto dimension = [](std::int64_t x) { return static_cast<std::size_t>(x); };
    const std::size_t a_row = dimension(args_.trans_a ? 1 : args_.lda),
                      a_step = dimension(args_.trans_a ? args_.lda : 1),
                      b_column = dimension(args_.trans_b ? args_.ldb : 1),
                      b_step = dimension(args_.trans_b ? 1 : args_.ldb);
    std::vector<Term> out;
    for (std::size_t i = 0; i < dimension(args_.batch); ++i)
      for (std::size_t r = 0; r < dimension(args_.m); ++r)
        for (std::size_t x = 0; x < dimension(args_.n); ++x) {
          const double* left = a.data() + i * dimension(args_.a_batch_stride) + r * a_row;
          const double* right = b.data() + i * dimension(args_.b_batch_stride) + x * b_column;
          Term term;
          for (std::size_t l = 0; l < dimension(args_.k); ++l) {
            const double product = left[l * a_step] * right[l * b_step];
            term.sum += product;
            term.magnitude += std::abs(product);
          }
          out.push_back({args_.alpha * term.sum, std::abs(args_.alpha) * term.magnitude});
        }
    return out;
  }

  // A sum of k products in any order, with what is added to it and to `rest`, is off by at most
  // k + 4 roundings of the sum of magnitudes; f64, in which the reference rounds as often, by twice
  // that. tf32 rounds both factors to 11 bits.
  double error(double magnitude, double rest) const {
    const double u = args_.dtype == f64 ? 2 * epsilon(f64) : epsilon(f32);
    return (args_.k + 4) * u * (magnitude + rest) + (args_.tf32 ? 2.01 * 0x1p-11 * magnitude : 0);
  }

 private:
  Factors(Case& c, const Product& p, std::int32_t a_rows, std::int32_t a_cols, std::int32_t b_rows,
          std::int32_t b_cols)
      : a_(matrices(c, p, p.batch, stride(a_rows, a_cols, p), a_rows, a_cols, ld(a_cols, p))),
        b_(matrices(c, p, p.one_b ? 1 : p.batch, stride(b_rows, b_cols, p), b_rows, b_cols,
                    ld(b_cols, p))),
        bias_(c.input(p.dtype, p.n, -1, 1, p.shift_bytes)),
        has_bias_(p.bias) {
    args_.alpha = p.alpha;
    args_.beta = p.beta;
    args_.a_batch_stride = stride(a_rows, a_cols, p);
    args_.b_batch_stride = p.one_b ? 0 : stride(b_rows, b_cols, p);
    args_.batch = p.batch;
    args_.m = p.m;
    args_.n = p.n;
    args_.k = p.k;
    args_.lda = ld(a_cols, p);
    args_.ldb = ld(b_cols, p);
    args_.dtype = p.dtype;
    args_.c_dtype = p.c_dtype;
    args_.trans_a = p.trans_a;
    args_.trans_b = p.trans_b;
    args_.tf32 = p.tf32;
  }
  static std::int32_t ld(std::int32_t cols, const Product& p) { return std::max(cols, 1) + p.gap; }
  static std::int64_t stride(std::int32_t rows, std::int32_t cols, const Product& p) {
    return std::max<std::int64_t>(1, std::int64_t{rows} * ld(cols, p) + p.gap);
  }

  Operand &a_, &b_, &bias_;
  bool has_bias_;
  GemmArgs args_{};
};

// A value of C that is off by `error` before it is rounded to its dtype.
template <class C>
Bounded<C> off_by(double error, double value) {
  Bounded<C> x = Bounded<C>::given(value);
  x.error = error;
  return x;
}

void check_product(Case& c, const Product& p) {
  const Factors factors(c, p);
  const std::int32_t ldc = p.n + p.gap;
  const std::int64_t stride = std::int64_t{p.m} * ldc + p.gap;
  // Elements stay aligned to their own size.
  const std::int64_t shift =
      round_up(p.shift_bytes, static_cast<std::int64_t>(size_bytes(p.c_dtype)));
  Operand& out = p.beta == 0 || p.c0 ? c.output(p.c_dtype, p.batch * stride, shift)
                                     : c.updated(p.c_dtype, p.batch * stride, -2, 2, shift);
  Operand& c0 = p.c0 ? c.input(p.c_dtype, p.batch * stride, -2, 2, shift) : out;
  const std::vector<double> before = contents(c0);
  c.compute([&](const Kernels& kernels, Side side, Exec& exec) {
    GemmArgs args = factors.at(side);
    args.c = out.at(side);
    args.c0 = p.c0 ? c0.at(side) : nullptr;
    args.ldc = ldc;
    args.c_batch_stride = stride;
    kernels.gemm(args, exec);
  });
  const std::vector<Term> products = factors.products();
  std::vector<double> expected = contents(out), bounds(expected.size());  // gaps stay
  in_compute_type(p.dtype, [&]<class C>(C) {
    for (std::size_t i = 0; i < products.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i) / p.n,
                 column = static_cast<std::int64_t>(i) % p.n;
      const auto at = static_cast<std::size_t>(row / p.m * stride + row % p.m * ldc + column);
      const double old = p.beta == 0 ? 0 : p.beta * before[at], added = factors.bias(column);
      expected[at] = products[i].sum + old + added;
      const double error = factors.error(products[i].magnitude, std::abs(old) + std::abs(added));
      bounds[at] = stored_error(p.c_dtype, off_by<C>(error, expected[at]));
      // The library rounds what it adds to beta C first, the product or the bias.
      if (p.bias && p.beta != 0 && c.target().driver)
        bounds[at] += std::max(stored_error(p.c_dtype, off_by<C>(error, products[i].sum + old)),
                               stored_error(p.c_dtype, off_by<C>(error, added + old)));
    }
  });
  for (std::size_t i = 0; i < expected.size(); ++i)
    c.near(out, static_cast<std::int64_t>(i), expected[i], bounds[i]);
  c.next();
}

}  // namespace

TESSERA_CASE("gemm", "every orientation and dtype, sizes that are multiples of nothing") {
  for (const DType dtype : kFloats)
    for (int orientation = 0; orientation < 4; ++orientation)
      for (const auto& [m, n, k] : {std::array{1, 1, 1},
                                    {1, 37, 19},
                                    {23, 1, 65},
                                    {5, 3, 2},
                                    {67, 45, 33},
                                    {130, 270, 300}})
        check_product(
            c, {.dtype = dtype,
                .c_dtype = size_bytes(dtype) == 2 && c.integer(0, 1) == 1 ? f32 : dtype,
                .batch = static_cast<std::int32_t>(m > 100 ? 1 : c.integer(1, 3)),
                .m = m,
                .n = n,
                .k = k,
                .trans_a = (orientation & 1) != 0,
                .trans_b = (orientation & 2) != 0,
                .bias = c.integer(0, 1) == 1,
                .alpha = 0.5,
                .beta = static_cast<double>(c.integer(0, 2)),
                .gap = static_cast<std::int32_t>(c.integer(0, 3)),
                .shift_bytes = c.integer(0, 1) * static_cast<std::int64_t>(size_bytes(dtype)),
                .one_b = c.integer(0, 1) == 1,
                .c0 = c.integer(0, 1) == 1});
}

TESSERA_CASE("gemm", "a linear layer: x W^T + bias, dy W, dy^T x into f32, twice") {
  for (const DType dtype : kFloats) {
    const Product y{.dtype = dtype,
                    .c_dtype = dtype,
                    .batch = 1,
                    .m = 128,
                    .n = 96,
                    .k = 64,
                    .trans_a = false,
                    .trans_b = true,
                    .bias = true,
                    .alpha = 1,
                    .beta = 0};
    check_product(c, y);
    Product with_residual = y;
    with_residual.beta = 1;
    with_residual.c0 = true;
    check_product(c, with_residual);
    Product dx = y;
    dx.trans_b = dx.bias = false;
    check_product(c, dx);
    Product dw = dx;
    dw.trans_a = true;
    dw.alpha = 0.25;  // of a mean over 4 ranks
    if (dtype != f64) dw.c_dtype = f32;
    for (const double beta : {0.0, 1.0}) {
      dw.beta = beta;
      check_product(c, dw);
    }
  }
}

TESSERA_CASE("gemm", "long sums, which a library may split") {
  for (const DType dtype : kFloats)
    for (const bool trans : {false, true})
      check_product(c, {.dtype = dtype,
                        .c_dtype = dtype,
                        .batch = 1,
                        .m = 32,
                        .n = 16,
                        .k = 4096,
                        .trans_a = trans,
                        .trans_b = !trans,
                        .bias = false,
                        .alpha = 1,
                        .beta = 0});
}

// The CPU's: more rows, and columns, than one panel has.
TESSERA_CASE("gemm", "products wider and taller than a panel are cut without a seam") {
  for (int orientation = 0; orientation < 3; ++orientation)
    check_product(c, {.dtype = f32,
                      .c_dtype = f32,
                      .batch = 1,
                      .m = 1061,
                      .n = 801,
                      .k = 17,
                      .trans_a = orientation == 1,
                      .trans_b = orientation == 2,
                      .bias = true,
                      .alpha = 1,
                      .beta = 1,
                      .gap = 1,
                      .c0 = orientation == 1});
}

TESSERA_CASE("gemm", "f32 operands rounded to tf32") {
  check_product(c, {.dtype = f32,
                    .c_dtype = f32,
                    .batch = 1,
                    .m = 64,
                    .n = 64,
                    .k = 128,
                    .trans_a = false,
                    .trans_b = true,
                    .bias = true,
                    .alpha = 1,
                    .beta = 0,
                    .tf32 = true});
}

TESSERA_CASE("gemm", "sums of nothing, and products without an element") {
  for (const DType dtype : kFloats)
    for (const double beta : {0.0, 0.5})
      for (const bool bias : {false, true})
        for (int empty = 0; empty < 4; ++empty)
          check_product(c, {.dtype = dtype,
                            .c_dtype = size_bytes(dtype) == 2 && bias ? f32 : dtype,
                            .batch = empty == 3 ? 0 : 2,
                            .m = empty == 1 ? 0 : 5,
                            .n = empty == 2 ? 0 : 9,
                            .k = empty == 0 ? 0 : 3,
                            .trans_a = false,
                            .trans_b = true,
                            .bias = bias,
                            .alpha = 1,
                            .beta = beta,
                            .gap = 2,
                            .c0 = beta != 0 && bias});
}

TESSERA_CASE("gemm", "a product worked by hand, in every orientation") {
  const double a[] = {1, 2, 3, 4, 5, 6}, a_t[] = {1, 4, 2, 5, 3, 6};        // [2, 3] and [3, 2]
  const double b[] = {7, 8, 9, 10, 11, 12}, b_t[] = {7, 9, 11, 8, 10, 12};  // [3, 2] and [2, 3]
  // 2 x {58, 64, 139, 154} + 10 x {1, 2, 3, 4} + {1, -1}, whole numbers that f32 holds
  const double expected[] = {127, 147, 309, 347};
  for (const bool trans_a : {false, true})
    for (const bool trans_b : {false, true}) {
      Operand &left = c.input(f32, 6), &right = c.input(f32, 6), &bias = c.input(f32, 2),
              &out = c.updated(f32, 4);
      for (std::int64_t i = 0; i < 6; ++i) {
        left.set(i, (trans_a ? a_t : a)[i]);
        right.set(i, (trans_b ? b_t : b)[i]);
      }
      for (std::int64_t i = 0; i < 2; ++i) bias.set(i, i == 0 ? 1 : -1);
      for (std::int64_t i = 0; i < 4; ++i) out.set(i, static_cast<double>(i + 1));
      c.compute([&](const Kernels& kernels, Side side, Exec& exec) {
        kernels.gemm({.c = out.at(side),
                      .a = left.at(side),
                      .b = right.at(side),
                      .bias = bias.at(side),
                      .alpha = 2,
                      .beta = 10,
                      .a_batch_stride = 0,
                      .b_batch_stride = 0,
                      .c_batch_stride = 0,
                      .batch = 1,
                      .m = 2,
                      .n = 2,
                      .k = 3,
                      .lda = trans_a ? 2 : 3,
                      .ldb = trans_b ? 3 : 2,
                      .ldc = 2,
                      .dtype = f32,
                      .c_dtype = f32,
                      .trans_a = trans_a,
                      .trans_b = trans_b},
                     exec);
      });
      for (std::int64_t i = 0; i < 4; ++i) c.near(out, i, expected[i], 0);
      c.next();
    }
}

// The CPU rounds the product to its dtype before it applies the function. Over 16-bit products the
// hardware's tanh is off by 2^-11 of itself (PTX ISA, tanh.approx.f32): a value by |x| / 2 times
// that, the derivative by at most 3 |x| 2^-10 + 2^-11 for |x| < 3.
TESSERA_CASE("gemm", "with GELU, and its derivative") {
  for (const DType dtype : kFloats)
    for (const bool backward : {false, true})
      for (const bool aligned : {false, true}) {
        const Product p{.dtype = dtype,
                        .c_dtype = dtype,
                        .batch = 1,
                        .m = 33,
                        .n = aligned ? 64 : 45,
                        .k = static_cast<std::int32_t>(c.integer(1, 40)),
                        .trans_a = c.integer(0, 1) == 1,
                        .trans_b = c.integer(0, 1) == 1,
                        .bias = !backward && c.integer(0, 1) == 1,
                        .alpha = 1,
                        .beta = 0,
                        .gap = aligned ? 0 : 1};
        const Factors factors(c, p);
        const std::int32_t ld = p.n + p.gap;
        Operand& out = c.output(dtype, std::int64_t{p.m} * ld);
        Operand& aux = backward ? c.input(dtype, std::int64_t{p.m} * ld, -3, 3)
                                : c.output(dtype, std::int64_t{p.m} * ld);
        c.compute([&](const Kernels& kernels, Side side, Exec& exec) {
          const GemmArgs args = factors.at(side);
          kernels.gemm_gelu({.c = out.at(side),
                             .aux = aux.at(side),
                             .a = args.a,
                             .b = args.b,
                             .bias = args.bias,
                             .m = p.m,
                             .n = p.n,
                             .k = p.k,
                             .lda = args.lda,
                             .ldb = args.ldb,
                             .ldc = ld,
                             .ld_aux = ld,
                             .dtype = dtype,
                             .trans_a = p.trans_a,
                             .trans_b = p.trans_b,
                             .backward = backward},
                            exec);
        });
        const std::vector<Term> products = factors.products();
        in_compute_type(dtype, [&]<class C>(C) {
          for (std::size_t i = 0; i < products.size(); ++i) {
            const auto row = static_cast<std::int64_t>(i) / p.n,
                       column = static_cast<std::int64_t>(i) % p.n, at = row * ld + column;
            const double added = factors.bias(column), product = products[i].sum + added;
            const double tanh = size_bytes(dtype) == 2 ? 0x1p-11 * std::abs(product) : 0;
            auto x = off_by<C>(factors.error(products[i].magnitude, std::abs(added)), product);
            // The library rounds the product before it adds a bias.
            if (p.bias && c.target().driver)
              x.error += stored_error(dtype, off_by<C>(x.error, products[i].sum));
            if (!backward) near(c, aux, at, x);
            x.error = stored_error(dtype, x);
            Bounded<C> y = backward ? x * gelu_slope(Bounded<C>::given(aux.get(at))) : gelu(x);
            y.error += (backward ? 19 : 0.5) * tanh;
            c.near(out, at, backward ? product * slope_of_gelu(aux.get(at)) : gelu_of(product),
                   stored_error(dtype, y));
          }
        });
        c.next();
      }
}

}  // namespace kernel_test
