// The CPU's products with GELU are the two kernels that they stand for, bit by bit.
#include "tests/kernels/support.hpp"

using namespace kernel_test;

TEST_CASE("a product with GELU or its derivative has the bits of the product and the function",
          "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats)
    for (const bool backward : {false, true})
      for (const int gap : {0, 3}) {
        const auto m = static_cast<std::int32_t>(random.integer(1, 40)),
                   n = static_cast<std::int32_t>(random.integer(1, 70)),
                   k = static_cast<std::int32_t>(random.integer(0, 50));
        const bool trans_a = random.integer(0, 1) == 1, trans_b = random.integer(0, 1) == 1;
        INFO(dtype << (backward ? ", backward, " : ", forward, ") << m << " x " << n << " x " << k
                   << ", gap " << gap);
        const std::int32_t lda = (trans_a ? m : k) + gap, ldb = (trans_b ? k : n) + gap,
                           ld_aux = n + gap, ldc = n + 2 * gap;
        const Array a = random.array(dtype, std::int64_t{trans_a ? k : m} * lda, -1, 1),
                    b = random.array(dtype, std::int64_t{trans_b ? n : k} * ldb, -1, 1),
                    bias = random.array(dtype, n, -1, 1);
        Array aux(dtype, std::int64_t{m} * ld_aux), c(dtype, std::int64_t{m} * ldc);
        aux.fill(NAN);
        c.fill(NAN);
        if (backward)
          for (std::int64_t i = 0; i < std::int64_t{m} * n; ++i)
            aux.set(i / n * ld_aux + i % n, random.uniform(-3, 3));
        Array product = backward ? c : aux, expected = c;
        GemmArgs apart{};
        apart.c = product.data();
        apart.a = a.data();
        apart.b = b.data();
        apart.bias = backward ? nullptr : bias.data();
        apart.alpha = 1;
        apart.batch = 1;
        apart.m = m;
        apart.n = n;
        apart.k = k;
        apart.lda = lda;
        apart.ldb = ldb;
        apart.ldc = backward ? ldc : ld_aux;
        apart.dtype = apart.c_dtype = dtype;
        apart.trans_a = trans_a;
        apart.trans_b = trans_b;
        Exec alone;
        cpu_kernels().gemm(apart, alone);
        for (std::int32_t row = 0; row < m; ++row) {
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
          forward.count = derivative.count = n;
          if (backward)
            cpu_kernels().binary(derivative, alone);
          else
            cpu_kernels().unary(forward, alone);
        }
        on_threads(
            [&](Exec& exec) {
              cpu_kernels().gemm_gelu({.c = c.data(),
                                       .aux = aux.data(),
                                       .a = a.data(),
                                       .b = b.data(),
                                       .bias = apart.bias,
                                       .m = m,
                                       .n = n,
                                       .k = k,
                                       .lda = lda,
                                       .ldb = ldb,
                                       .ldc = ldc,
                                       .ld_aux = ld_aux,
                                       .dtype = dtype,
                                       .trans_a = trans_a,
                                       .trans_b = trans_b,
                                       .backward = backward},
                                      exec);
            },
            c, aux);
        CHECK((c.bytes == expected.bytes));
        if (!backward) CHECK((aux.bytes == product.bytes));
      }
}
