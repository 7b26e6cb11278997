// Reductions against sums in double precision, over every position of the reduced dimension.
#include <limits>

#include "tests/kernels/support.hpp"

using namespace kernel_test;

namespace {

struct View {
  std::int64_t outer, n, inner;
};

// Rounding errors of a blocked sum of n terms, as the contract bounds them; and those of the
// reference, which adds the terms one after the other in long double (f64 on some processors).
double sum_roundings(std::int64_t n, DType dtype) {
  const double reference = std::numeric_limits<long double>::epsilon() / 2;
  return std::log2(static_cast<double>(n) + 1) + 40 +
         static_cast<double>(n) * reference / compute_epsilon(dtype);
}

}  // namespace

TEST_CASE("sums, means and sums of squares agree with double precision", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats) {
    for (const View& v : {View{1, 0, 3},
                          {3, 1, 1},
                          {5, 7, 1},
                          {2, 1000, 1},
                          {1, 70001, 1},
                          {3, 33, 65},
                          {1, 1531, 130},
                          {0, 4, 1}}) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::sumsq}) {
        INFO(dtype << ", op " << static_cast<int>(op) << ": " << v.outer << " x " << v.n << " x "
                   << v.inner);
        const Array in = random.array(dtype, v.outer * v.n * v.inner);
        const DType out_dtype = size_bytes(dtype) == 2 && (v.n > 5000 || random.integer(0, 1) == 1)
                                    ? DType::f32
                                    : dtype;  // f16 ends at 65504
        Array out(out_dtype, v.outer * v.inner);
        on_threads(
            [&](Exec& exec) {
              cpu_kernels().reduce({.out = out.data(),
                                    .in = in.data(),
                                    .outer = v.outer,
                                    .n = v.n,
                                    .inner = v.inner,
                                    .op = op,
                                    .dtype = dtype,
                                    .out_dtype = out_dtype},
                                   exec);
            },
            out);
        std::vector<double> expected;
        for (std::int64_t i = 0; i < v.outer * v.inner; ++i) {
          long double sum = 0;
          for (std::int64_t j = 0; j < v.n; ++j) {
            const long double x = in[(i / v.inner * v.n + j) * v.inner + i % v.inner];
            sum += op == ReduceOp::sumsq ? x * x : x;
          }
          if (op == ReduceOp::mean) sum /= static_cast<long double>(v.n);
          expected.push_back(static_cast<double>(sum));
        }
        // Terms are at most 4 in magnitude.
        const double terms = op == ReduceOp::mean ? 4 : 4 * static_cast<double>(v.n);
        require_close(out, expected, epsilon(out_dtype),
                      sum_roundings(v.n, dtype) * compute_epsilon(dtype) * terms);
      }
    }
  }
}

TEST_CASE("integers and booleans are summed exactly", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : {DType::i32, DType::i64, DType::boolean}) {
    const Array in = random.array(dtype, 3 * 101 * 5, -1000, 1000);
    Array out(DType::i64, 15);
    on_threads(
        [&](Exec& exec) {
          cpu_kernels().reduce({.out = out.data(),
                                .in = in.data(),
                                .outer = 3,
                                .n = 101,
                                .inner = 5,
                                .op = ReduceOp::sum,
                                .dtype = dtype,
                                .out_dtype = DType::i64},
                               exec);
        },
        out);
    for (std::int64_t i = 0; i < 15; ++i) {
      double sum = 0;
      for (std::int64_t j = 0; j < 101; ++j) sum += in[(i / 5 * 101 + j) * 5 + i % 5];
      REQUIRE(out[i] == sum);
    }
  }
}

TEST_CASE("max, min and argmax find the first best element and the first NaN", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kAll) {
    for (const View& v : {View{1, 1, 1}, {7, 19, 1}, {2, 300, 3}, {1, 40, 70}, {2, 0, 2}}) {
      INFO(dtype << ": " << v.outer << " x " << v.n << " x " << v.inner);
      Array in = random.array(dtype, v.outer * v.n * v.inner, -4, 4);
      if (is_floating(dtype))  // ties and NaN
        for (std::int64_t i = 0; i < in.size(); ++i)
          in.set(i, random.integer(0, 60) == 0 ? NAN : std::round(2 * in[i]) / 2);
      Array most(dtype, v.outer * v.inner), least(dtype, v.outer * v.inner),
          where(DType::i64, v.outer * v.inner);
      on_threads(
          [&](Exec& exec) {
            ReduceArgs args{.out = most.data(),
                            .in = in.data(),
                            .outer = v.outer,
                            .n = v.n,
                            .inner = v.inner,
                            .op = ReduceOp::max,
                            .dtype = dtype,
                            .out_dtype = dtype};
            cpu_kernels().reduce(args, exec);
            args.out = least.data();
            args.op = ReduceOp::min;
            cpu_kernels().reduce(args, exec);
            args.out = where.data();
            args.op = ReduceOp::argmax;
            args.out_dtype = DType::i64;
            cpu_kernels().reduce(args, exec);
          },
          most, least, where);
      for (std::int64_t i = 0; i < v.outer * v.inner; ++i) {
        const auto at = [&](std::int64_t j) {
          return in[(i / v.inner * v.n + j) * v.inner + i % v.inner];
        };
        std::int64_t best = 0, worst = 0;
        for (std::int64_t j = 1; j < v.n; ++j) {
          if (!std::isnan(at(best)) && (std::isnan(at(j)) || at(j) > at(best))) best = j;
          if (!std::isnan(at(worst)) && (std::isnan(at(j)) || at(j) < at(worst))) worst = j;
        }
        REQUIRE(where[i] == static_cast<double>(best));
        if (v.n == 0) {
          if (is_floating(dtype))
            REQUIRE((std::isinf(most[i]) && most[i] < 0 && std::isinf(least[i]) && least[i] > 0));
          continue;
        }
        REQUIRE((std::isnan(at(best)) ? std::isnan(most[i]) : most[i] == at(best)));
        REQUIRE((std::isnan(at(worst)) ? std::isnan(least[i]) : least[i] == at(worst)));
      }
    }
  }
}

TEST_CASE("the sum of squares of a flat array is exact to double precision", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const std::int64_t n : {0, 1, 15, 16, 17, 65537, 300001}) {
    for (const DType out_dtype : {DType::f32, DType::f64}) {
      for (const bool accumulate : {false, true}) {
        INFO("n " << n << " into " << out_dtype);
        const Array in = random.array(DType::f32, n);
        Array out(out_dtype, 1);
        out.set(0, accumulate ? 2 : NAN);
        on_threads(
            [&](Exec& exec) {
              cpu_kernels().sumsq_flat({.out = out.data(),
                                        .in = static_cast<const float*>(in.data()),
                                        .count = n,
                                        .out_dtype = out_dtype,
                                        .accumulate = accumulate},
                                       exec);
            },
            out);
        double sum = accumulate ? 2 : 0;
        for (std::int64_t i = 0; i < n; ++i) sum += in[i] * in[i];
        require_close(
            out, std::vector{sum},
            // Squares of f32 are exact in f64. Here and there n additions, one to what was there.
            epsilon(out_dtype) + 2 * (static_cast<double>(n) + 1) * 0x1p-53);
      }
    }
  }
}
