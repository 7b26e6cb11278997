// Matrix products of every orientation and dtype against sums in double precision.
#include "tests/kernels/support.hpp"

using namespace kernel_test;

namespace {

struct Case {
  std::int32_t batch, m, n, k;
  bool trans_a, trans_b, bias;
  double alpha, beta;
};

// Leading dimensions and batch strides have gaps, whose NaN must not be read, and which must not be
// written.
struct Problem {
  Array a, b, c, bias;
  GemmArgs args;

  Problem(kernel_test::Random& random, const Case& s, DType dtype, DType c_dtype)
      : a(dtype, 0), b(dtype, 0), c(c_dtype, 0), bias(dtype, 0), args{} {
    const std::int32_t a_rows = s.trans_a ? s.k : s.m, a_cols = s.trans_a ? s.m : s.k;
    const std::int32_t b_rows = s.trans_b ? s.n : s.k, b_cols = s.trans_b ? s.k : s.n;
    args = {.c = nullptr,
            .a = nullptr,
            .b = nullptr,
            .bias = nullptr,
            .alpha = s.alpha,
            .beta = s.beta,
            .a_batch_stride = std::int64_t{a_rows} * (a_cols + 3) + 5,
            .b_batch_stride = 0,
            .c_batch_stride = std::int64_t{s.m} * (s.n + 1) + 2,
            .batch = s.batch,
            .m = s.m,
            .n = s.n,
            .k = s.k,
            .lda = a_cols + 3,
            .ldb = b_cols + 2,
            .ldc = s.n + 1,
            .dtype = dtype,
            .c_dtype = c_dtype,
            .trans_a = s.trans_a,
            .trans_b = s.trans_b};
    a = filled(random, dtype, s.batch, args.a_batch_stride, a_rows, a_cols, args.lda);
    b = filled(random, dtype, 1, std::int64_t{b_rows} * args.ldb + 1, b_rows, b_cols, args.ldb);
    c = filled(random, c_dtype, s.beta == 0 ? 0 : s.batch, args.c_batch_stride, s.m, s.n, args.ldc,
               s.batch);
    bias = random.array(dtype, s.n);
    args.a = a.data();
    args.b = b.data();
    args.c = c.data();
    args.bias = s.bias ? bias.data() : nullptr;
  }

  static Array filled(kernel_test::Random& random, DType dtype, std::int64_t batch,
                      std::int64_t stride, std::int64_t rows, std::int64_t cols, std::int64_t ld,
                      std::int64_t allocated = 0) {
    Array out(dtype, std::max(batch, allocated) * stride);
    out.fill(NAN);
    for (std::int64_t i = 0; i < batch; ++i)
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t x = 0; x < cols; ++x)
          out.set(i * stride + r * ld + x, random.uniform(-1, 1));
    return out;
  }

  void check() {
    const Array before = c;
    on_threads([&](Exec& exec) { cpu_kernels().gemm(args, exec); }, c);
    std::vector<double> expected(static_cast<std::size_t>(c.size()), NAN);
    double bound = 0;
    for (std::int64_t i = 0; i < args.batch; ++i)
      for (std::int64_t r = 0; r < args.m; ++r)
        for (std::int64_t x = 0; x < args.n; ++x) {
          double sum = 0, magnitude = 0;
          for (std::int64_t l = 0; l < args.k; ++l) {
            const double p =
                a[i * args.a_batch_stride + (args.trans_a ? l * args.lda + r : r * args.lda + l)] *
                b[args.trans_b ? x * args.ldb + l : l * args.ldb + x];
            sum += p;
            magnitude += std::abs(p);
          }
          const std::int64_t at = i * args.c_batch_stride + r * args.ldc + x;
          const double old = args.beta == 0 ? 0 : args.beta * before[at],
                       add = args.bias == nullptr ? 0 : bias[x];
          expected[static_cast<std::size_t>(at)] = args.alpha * sum + old + add;
          bound = std::max(bound, std::abs(args.alpha) * magnitude + std::abs(old) + std::abs(add));
        }
    // A sum of k products in any order is off by at most (k + 4) roundings of the sum of
    // magnitudes.
    require_close(c, expected, epsilon(args.c_dtype),
                  (args.k + 4) * compute_epsilon(args.dtype) * bound);
  }
};

}  // namespace

TEST_CASE("products of every orientation, dtype and odd size agree with double precision",
          "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats) {
    for (int orientation = 0; orientation < 4; ++orientation) {
      for (const auto& [m, n, k] : {std::array{1, 1, 1},
                                    {1, 37, 19},
                                    {23, 1, 65},
                                    {5, 3, 2},
                                    {67, 45, 33},
                                    {130, 270, 300}}) {
        const Case s{.batch = static_cast<std::int32_t>(random.integer(1, 3)),
                     .m = m,
                     .n = n,
                     .k = k,
                     .trans_a = (orientation & 1) != 0,
                     .trans_b = (orientation & 2) != 0,
                     .bias = random.integer(0, 1) == 1,
                     .alpha = 0.5,
                     .beta = static_cast<double>(random.integer(0, 2))};
        const DType c_dtype =
            size_bytes(dtype) == 2 && random.integer(0, 1) == 1 ? DType::f32 : dtype;
        INFO(dtype << ", " << m << " x " << k << " by " << k << " x " << n << ", orientation "
                   << orientation << ", beta " << s.beta);
        Problem(random, s, dtype, c_dtype).check();
      }
    }
  }
}

TEST_CASE("products wider and taller than a panel are cut without a seam", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (int orientation = 0; orientation < 3; ++orientation) {
    const Case s{.batch = 1,
                 .m = 1061,
                 .n = 801,
                 .k = 17,
                 .trans_a = orientation == 1,
                 .trans_b = orientation == 2,
                 .bias = true,
                 .alpha = 1,
                 .beta = 1};
    Problem(random, s, DType::f32, DType::f32).check();
  }
}

TEST_CASE("empty products write what the contract says and never read C when beta is 0",
          "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats) {
    for (const double beta : {0.0, 0.5}) {
      INFO(dtype << ", beta " << beta);
      Case s{.batch = 2,
             .m = 5,
             .n = 9,
             .k = 0,
             .trans_a = false,
             .trans_b = true,
             .bias = true,
             .alpha = 1,
             .beta = beta};
      Problem(random, s, dtype, dtype).check();
      s.bias = false;
      Problem(random, s, dtype, dtype).check();
      for (int empty = 0; empty < 3; ++empty) {
        s.batch = empty == 0 ? 0 : 1;
        s.m = empty == 1 ? 0 : 4;
        s.n = empty == 2 ? 0 : 4;
        s.k = 3;
        Problem(random, s, dtype, dtype).check();
      }
    }
  }
}

TEST_CASE("a product with GELU or its derivative has the bits of the product and the function",
          "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats)
    for (const bool backward : {false, true})
      for (const int gap : {0, 3}) {
        Case s{.batch = 1,
               .m = static_cast<std::int32_t>(random.integer(1, 40)),
               .n = static_cast<std::int32_t>(random.integer(1, 70)),
               .k = static_cast<std::int32_t>(random.integer(0, 50)),
               .trans_a = random.integer(0, 1) == 1,
               .trans_b = random.integer(0, 1) == 1,
               .bias = !backward,
               .alpha = 1,
               .beta = 0};
        INFO(dtype << (backward ? ", backward, " : ", forward, ") << s.m << " x " << s.n << " x "
                   << s.k << ", gap " << gap);
        Problem p(random, s, dtype, dtype);
        const std::int32_t ld_aux = s.n + gap, ldc = s.n + 2 * gap;
        Array aux(dtype, std::int64_t{s.m} * ld_aux), c(dtype, std::int64_t{s.m} * ldc);
        aux.fill(NAN);
        c.fill(NAN);
        if (backward)
          for (std::int64_t i = 0; i < std::int64_t{s.m} * s.n; ++i)
            aux.set(i / s.n * ld_aux + i % s.n, random.uniform(-3, 3));
        Array product = backward ? c : aux, expected = c;
        p.args.c = product.data();
        p.args.ldc = backward ? ldc : ld_aux;
        Exec alone;
        cpu_kernels().gemm(p.args, alone);
        for (std::int32_t row = 0; row < s.m; ++row) {
          const auto at = [&](Array& x, std::int32_t ld) {
            return x.bytes.data() + size_bytes(dtype) * static_cast<std::size_t>(row * ld);
          };
          UnaryArgs forward{};
          forward.out = at(expected, ldc);
          forward.in = at(product, ld_aux);
          forward.op = UnaryOp::gelu;
          forward.out_dtype = forward.in_dtype = dtype;
          BinaryArgs derivative{};
          derivative.out = at(expected, ldc);
          derivative.a = at(aux, ld_aux);
          derivative.b = at(product, ldc);
          derivative.op = BinaryOp::gelu_backward;
          derivative.dtype = dtype;
          forward.count = derivative.count = s.n;
          if (backward)
            cpu_kernels().binary(derivative, alone);
          else
            cpu_kernels().unary(forward, alone);
        }
        on_threads(
            [&](Exec& exec) {
              cpu_kernels().gemm_gelu({.c = c.data(),
                                       .aux = aux.data(),
                                       .a = p.args.a,
                                       .b = p.args.b,
                                       .bias = p.args.bias,
                                       .m = s.m,
                                       .n = s.n,
                                       .k = s.k,
                                       .lda = p.args.lda,
                                       .ldb = p.args.ldb,
                                       .ldc = ldc,
                                       .ld_aux = ld_aux,
                                       .dtype = dtype,
                                       .trans_a = s.trans_a,
                                       .trans_b = s.trans_b,
                                       .backward = backward},
                                      exec);
            },
            c, aux);
        CHECK((c.bytes == expected.bytes));
        if (!backward) CHECK((aux.bytes == product.bytes));
      }
}

TEST_CASE("a product worked by hand, in every orientation", "[kernels]") {
  const float a[] = {1, 2, 3, 4, 5, 6}, a_t[] = {1, 4, 2, 5, 3, 6};        // [2, 3] and [3, 2]
  const float b[] = {7, 8, 9, 10, 11, 12}, b_t[] = {7, 9, 11, 8, 10, 12};  // [3, 2] and [2, 3]
  const float bias[] = {1, -1};
  for (const bool trans_a : {false, true})
    for (const bool trans_b : {false, true}) {
      INFO("trans_a " << trans_a << ", trans_b " << trans_b);
      std::vector<float> c = {1, 2, 3, 4};
      const GemmArgs args{.c = c.data(),
                          .a = trans_a ? a_t : a,
                          .b = trans_b ? b_t : b,
                          .bias = bias,
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
                          .dtype = DType::f32,
                          .c_dtype = DType::f32,
                          .trans_a = trans_a,
                          .trans_b = trans_b};
      Exec exec;
      cpu_kernels().gemm(args, exec);
      // 2 x {58, 64, 139, 154} + 10 x {1, 2, 3, 4} + {1, -1}, whole numbers that f32 holds
      CHECK(c == std::vector<float>{127, 147, 309, 347});
    }
}
