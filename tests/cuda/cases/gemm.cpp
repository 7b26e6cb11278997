// Matrix products of every orientation, dtype and alignment, and those with GELU.
#include <algorithm>
#include <array>
#include <cmath>

#include "tessera/base/checked.hpp"
#include "tests/cuda/case.hpp"

using namespace cuda_test;

namespace {

constexpr DType kFloats[] = {f32, bf16, f16, f64};

double compute_epsilon(DType dtype) { return dtype == f64 ? 0x1p-53 : 0x1p-24; }

struct Product {
  DType dtype, c_dtype;
  std::int32_t batch, m, n, k;
  bool trans_a, trans_b, bias;
  double alpha, beta;
  std::int32_t gap = 0;          // elements between rows, and between matrices
  std::int64_t shift_bytes = 0;  // of all operands
  bool tf32 = false, one_b = false;
};

// A matrix of `rows` x `cols` in rows `ld` apart, `batch` of them `stride` apart; NaN between them.
Operand& filled(Case& c, const Product& p, DType dtype, std::int32_t batch, std::int64_t stride,
                std::int32_t rows, std::int32_t cols, std::int32_t ld) {
  Operand& x = c.input(dtype, batch * stride, -1, 1, p.shift_bytes);
  for (std::int64_t i = 0; i < x.size(); ++i)
    if (i % stride % ld >= cols || i % stride / ld >= rows) x.set(i, NAN);
  return x;
}

struct Operands {
  Operand &a, &b, &bias;
  GemmArgs args;

  Operands(Case& c, const Product& p)
      : Operands(c, p, p.trans_a ? p.k : p.m, p.trans_a ? p.m : p.k, p.trans_b ? p.n : p.k,
                 p.trans_b ? p.k : p.n) {}

  GemmArgs at(Side side) const {
    GemmArgs out = args;
    out.a = a.at(side);
    out.b = b.at(side);
    out.bias = out.bias ? bias.at(side) : nullptr;
    return out;
  }

  // The largest sum of magnitudes |alpha| sum_l |a_il b_lj| over the elements of C.
  double magnitude() const {
    double largest = 0;
    for (std::int64_t i = 0; i < args.batch; ++i)
      for (std::int64_t r = 0; r < args.m; ++r)
        for (std::int64_t x = 0; x < args.n; ++x) {
          double sum = 0;
          for (std::int64_t l = 0; l < args.k; ++l)
            sum += std::abs(a.get(i * args.a_batch_stride +
                                  (args.trans_a ? l * args.lda + r : r * args.lda + l)) *
                            b.get(i * args.b_batch_stride +
                                  (args.trans_b ? x * args.ldb + l : l * args.ldb + x)));
          largest = std::max(largest, sum);
        }
    return std::abs(args.alpha) * largest;
  }

 private:
  Operands(Case& c, const Product& p, std::int32_t a_rows, std::int32_t a_cols, std::int32_t b_rows,
           std::int32_t b_cols)
      : a(filled(c, p, p.dtype, p.batch, stride(a_rows, a_cols, p), a_rows, a_cols,
                 std::max(a_cols, 1) + p.gap)),
        b(filled(c, p, p.dtype, p.one_b ? 1 : p.batch, stride(b_rows, b_cols, p), b_rows, b_cols,
                 std::max(b_cols, 1) + p.gap)),
        bias(c.input(p.dtype, p.n, -1, 1, p.shift_bytes)),
        args{} {
    args.bias = p.bias ? &args : nullptr;  // an address takes its place for each side
    args.alpha = p.alpha;
    args.beta = p.beta;
    args.a_batch_stride = stride(a_rows, a_cols, p);
    args.b_batch_stride = p.one_b ? 0 : stride(b_rows, b_cols, p);
    args.batch = p.batch;
    args.m = p.m;
    args.n = p.n;
    args.k = p.k;
    args.lda = std::max(a_cols, 1) + p.gap;
    args.ldb = std::max(b_cols, 1) + p.gap;
    args.dtype = p.dtype;
    args.c_dtype = p.c_dtype;
    args.trans_a = p.trans_a;
    args.trans_b = p.trans_b;
    args.tf32 = p.tf32;
  }
  static std::int64_t stride(std::int32_t rows, std::int32_t cols, const Product& p) {
    return std::max<std::int64_t>(1, std::int64_t{rows} * (std::max(cols, 1) + p.gap) + p.gap);
  }
};

// Two sums of k products, each in its own order, are each off by at most (k + 4) roundings of the
// sum of magnitudes; both round once more to C's dtype. tf32 rounds both factors to 11 bits.
double bound(const Operands& o, double magnitude) {
  const double rest = std::abs(o.args.beta) * 2 + (o.args.bias ? 1 : 0);
  return 2 * (o.args.k + 4) * compute_epsilon(o.args.dtype) * (magnitude + rest) +
         (o.args.tf32 ? 2 * 0x1p-11 * magnitude : 0);
}

void check(Case& c, const Product& p) {
  Operands o(c, p);
  const std::int32_t ldc = p.n + p.gap;
  const std::int64_t stride = std::int64_t{p.m} * ldc + p.gap;
  // Elements stay aligned to their own size.
  const std::int64_t shift =
      round_up(p.shift_bytes, static_cast<std::int64_t>(size_bytes(p.c_dtype)));
  Operand& out = p.beta == 0 ? c.output(p.c_dtype, p.batch * stride, shift)
                             : c.updated(p.c_dtype, p.batch * stride, -2, 2, shift);
  c.run([&](const Kernels& kernels, Side side, Exec& exec) {
    GemmArgs args = o.at(side);
    args.c = out.at(side);
    args.ldc = ldc;
    args.c_batch_stride = stride;
    kernels.gemm(args, exec);
  });
  c.close(out, 2 * epsilon(p.c_dtype), bound(o, o.magnitude()));
}

}  // namespace

TESSERA_CASE("gemm", "every orientation and dtype, sizes that are multiples of nothing") {
  for (const DType dtype : kFloats)
    for (int orientation = 0; orientation < 4; ++orientation)
      for (const auto& [m, n, k] : {std::array{1, 1, 1}, {1, 37, 19}, {23, 1, 65}, {67, 45, 33}})
        check(c, {.dtype = dtype,
                  .c_dtype = size_bytes(dtype) == 2 && c.integer(0, 1) == 1 ? f32 : dtype,
                  .batch = static_cast<std::int32_t>(c.integer(1, 3)),
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
                  .one_b = c.integer(0, 1) == 1});
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
    check(c, y);
    Product dx = y;
    dx.trans_b = dx.bias = false;
    check(c, dx);
    Product dw = dx;
    dw.trans_a = true;
    dw.alpha = 0.25;  // of a mean over 4 ranks
    if (dtype != f64) dw.c_dtype = f32;
    for (const double beta : {0.0, 1.0}) {
      dw.beta = beta;
      check(c, dw);
    }
  }
}

TESSERA_CASE("gemm", "long sums, which a library may split") {
  for (const DType dtype : kFloats)
    for (const bool trans : {false, true})
      check(c, {.dtype = dtype,
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

TESSERA_CASE("gemm", "f32 operands rounded to tf32") {
  check(c, {.dtype = f32,
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
          check(c, {.dtype = dtype,
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
                    .gap = 2});
  Operand& one = c.output(f32, 1);  // so that the case compares something on its own
  c.run([&](const Kernels& kernels, Side side, Exec& exec) {
    GemmArgs args{};
    args.c = one.at(side);
    args.a = args.b = one.at(side);
    args.batch = args.m = args.n = args.lda = args.ldb = args.ldc = 1;
    kernels.gemm(args, exec);
  });
  c.equal(one);
}

// gelu is x sigmoid(w(x)); its slope is at most 1.13. 16-bit products may reach the function before
// they are rounded, and the hardware's tanh is off by 2^-11 of itself (PTX ISA, tanh.approx.f32):
// off by |x| / 2 times that, and the derivative by at most 3 |x| 2^-10 + 2^-11 for |x| < 3.
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
        Operands o(c, p);
        const std::int32_t ld = p.n + p.gap;
        Operand& out = c.output(dtype, std::int64_t{p.m} * ld);
        Operand& aux = backward ? c.input(dtype, std::int64_t{p.m} * ld, -3, 3)
                                : c.output(dtype, std::int64_t{p.m} * ld);
        c.run([&](const Kernels& kernels, Side side, Exec& exec) {
          const GemmArgs args = o.at(side);
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
        const double magnitude = o.magnitude() + 1, sum = bound(o, magnitude);
        const double rounding = epsilon(dtype) * magnitude,
                     tanh = size_bytes(dtype) == 2 ? 0x1p-11 * magnitude : 0;
        if (!backward) c.close(aux, 2 * epsilon(dtype), sum);
        // The functions themselves are within 8 roundings of their result's scale.
        c.close(out, 2 * epsilon(dtype),
                1.13 * (sum + rounding) + (backward ? 19 : 0.5) * tanh +
                    8 * compute_epsilon(dtype) * magnitude);
      }
}
