// Elementwise kernels against the standard library in double precision, contiguous, strided and
// broadcast.
#include "tests/kernels/support.hpp"

using namespace kernel_test;

namespace {

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
// A derivative by central differences of a smooth function: off by h^2 f'''/6 + 2^-53 / h, below
// 1e-9 for h = 1e-5.
template <class F>
double slope(F f, double x) {
  return (f(x + 1e-5) - f(x - 1e-5)) / 2e-5;
}

double unary_value(UnaryOp op, double x) {
  switch (op) {
    case UnaryOp::neg:
      return -x;
    case UnaryOp::exp:
      return std::exp(x);
    case UnaryOp::log:
      return std::log(x);
    case UnaryOp::sqrt:
      return std::sqrt(x);
    case UnaryOp::rsqrt:
      return 1 / std::sqrt(x);
    case UnaryOp::tanh:
      return std::tanh(x);
    case UnaryOp::relu:
      return x > 0 ? x : 0;
    case UnaryOp::gelu:
      return gelu(x);
    case UnaryOp::silu:
      return x * sigmoid(x);
    case UnaryOp::abs:
      return std::abs(x);
    case UnaryOp::sigmoid:
      return sigmoid(x);
    case UnaryOp::logical_not:
      return x == 0;
    case UnaryOp::isfinite:
      return std::isfinite(x);
    default:
      return x;
  }
}

double binary_value(BinaryOp op, double a, double b) {
  switch (op) {
    case BinaryOp::add:
      return a + b;
    case BinaryOp::sub:
      return a - b;
    case BinaryOp::mul:
      return a * b;
    case BinaryOp::div:
      return a / b;
    case BinaryOp::min:
      return a < b ? a : b;
    case BinaryOp::max:
      return a > b ? a : b;
    case BinaryOp::pow:
      return std::pow(a, b);
    case BinaryOp::eq:
      return a == b;
    case BinaryOp::ne:
      return a != b;
    case BinaryOp::lt:
      return a < b;
    case BinaryOp::le:
      return a <= b;
    case BinaryOp::gt:
      return a > b;
    case BinaryOp::ge:
      return a >= b;
    case BinaryOp::logical_and:
      return a != 0 && b != 0;
    case BinaryOp::logical_or:
      return a != 0 || b != 0;
    case BinaryOp::gelu_backward:
      return b * slope(gelu, a);
    case BinaryOp::silu_backward:
      return b * slope([](double x) { return x * sigmoid(x); }, a);
    case BinaryOp::relu_backward:
      return a > 0 ? b : 0;
    case BinaryOp::tanh_backward:
      return b * (1 - a * a);
  }
  return 0;
}

const UnaryOp kFloatUnary[] = {UnaryOp::neg,   UnaryOp::exp,  UnaryOp::log,    UnaryOp::sqrt,
                               UnaryOp::rsqrt, UnaryOp::tanh, UnaryOp::relu,   UnaryOp::gelu,
                               UnaryOp::silu,  UnaryOp::abs,  UnaryOp::sigmoid};

// The vector functions are off by at most a few units in the last place; 16 of them leave room for
// the compositions. gelu and the logarithm lose relative accuracy near their zeros, hence the
// absolute part.
double tolerance(DType d) { return epsilon(d) + 16 * compute_epsilon(d); }

}  // namespace

TEST_CASE("unary operations agree with the standard library for odd sizes", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats) {
    for (const UnaryOp op : kFloatUnary) {
      for (const std::int64_t n : {0, 1, 7, 8, 9, 1000, 40001}) {
        INFO(dtype << ", op " << static_cast<int>(op) << ", n " << n);
        const bool positive = op == UnaryOp::log || op == UnaryOp::sqrt || op == UnaryOp::rsqrt;
        const Array in = random.array(dtype, n, positive ? 0.01 : -8, 8);
        Array out(dtype, n);
        on_threads(
            [&](Exec& exec) {
              cpu_kernels().unary({.out = out.data(),
                                   .in = in.data(),
                                   .count = n,
                                   .shape = {},
                                   .out_strides = {},
                                   .in_strides = {},
                                   .op = op,
                                   .out_dtype = dtype,
                                   .in_dtype = dtype,
                                   .ndim = 0},
                                  exec);
            },
            out);
        std::vector<double> expected;
        for (std::int64_t i = 0; i < n; ++i) expected.push_back(unary_value(op, in[i]));
        require_close(out, expected, tolerance(dtype), 16 * compute_epsilon(dtype));
      }
    }
  }
}

TEST_CASE("special values pass through the vector functions as the standard says", "[kernels]") {
  const double infinity = INFINITY;
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const UnaryOp op : {UnaryOp::exp, UnaryOp::log, UnaryOp::sqrt, UnaryOp::tanh,
                             UnaryOp::sigmoid, UnaryOp::relu, UnaryOp::isfinite}) {
      INFO(dtype << ", op " << static_cast<int>(op));
      const double values[] = {infinity, -infinity, NAN, 0.0,      1000.0, -1000.0,
                               1e-30,    -1.0,      1.0, infinity, NAN};
      Array in(dtype, 11);
      for (int i = 0; i < 11; ++i) in.set(i, values[i]);
      const DType out_dtype = op == UnaryOp::isfinite ? DType::boolean : dtype;
      Array out(out_dtype, 11);
      Exec exec;
      cpu_kernels().unary({.out = out.data(),
                           .in = in.data(),
                           .count = 11,
                           .shape = {},
                           .out_strides = {},
                           .in_strides = {},
                           .op = op,
                           .out_dtype = out_dtype,
                           .in_dtype = dtype,
                           .ndim = 0},
                          exec);
      std::vector<double> expected;
      for (int i = 0; i < 11; ++i) {
        const double x = in[i];
        expected.push_back(op == UnaryOp::relu && std::isnan(x) ? NAN : unary_value(op, x));
      }
      require_close(out, expected, tolerance(dtype),
                    1e-37);  // f32 results below its normal range become 0
    }
  }
}

TEST_CASE("copies cast from every dtype to every other", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType from : kAll) {
    for (const DType to : kAll) {
      INFO(from << " to " << to);
      const std::int64_t n = 1037;
      const Array in = random.array(from, n, -100, 100);
      Array out(to, n);
      on_threads(
          [&](Exec& exec) {
            cpu_kernels().unary({.out = out.data(),
                                 .in = in.data(),
                                 .count = n,
                                 .shape = {},
                                 .out_strides = {},
                                 .in_strides = {},
                                 .op = UnaryOp::copy,
                                 .out_dtype = to,
                                 .in_dtype = from,
                                 .ndim = 0},
                                exec);
          },
          out);
      Array expected(to, n);
      for (std::int64_t i = 0; i < n; ++i)
        expected.set(i, to == DType::boolean ? in[i] != 0 : in[i]);
      REQUIRE(out.bytes == expected.bytes);
    }
  }
}

TEST_CASE("16-bit conversions of every bit pattern agree with the scalar types", "[kernels]") {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Array narrow(dtype, 65536), wide(DType::f32, 65536), back(dtype, 65536);
    for (std::size_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      std::memcpy(narrow.bytes.data() + 2 * i, &bits, 2);
    }
    Exec exec;
    const auto copy = [&](Array& out, const Array& in) {
      cpu_kernels().unary({.out = out.data(),
                           .in = in.data(),
                           .count = 65536,
                           .shape = {},
                           .out_strides = {},
                           .in_strides = {},
                           .op = UnaryOp::copy,
                           .out_dtype = out.dtype,
                           .in_dtype = in.dtype,
                           .ndim = 0},
                          exec);
    };
    copy(wide, narrow);
    for (std::int64_t i = 0; i < 65536; ++i) {
      const double x = narrow[i], y = wide[i];
      if (!(x == y || (std::isnan(x) && std::isnan(y)))) FAIL(dtype << " pattern " << i);
    }
    // Around every value: rounding to nearest even at ties, just below and just above.
    kernel_test::Random random;
    INFO("seed " << random.seed);
    for (std::int64_t i = 0; i < 65536; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, wide.bytes.data() + 4 * i, 4);
      bits += static_cast<std::uint32_t>(random.integer(-0x8001, 0x8001));
      if (i % 3 == 0)
        bits = (bits & ~0xfffu) + 0x1000u * static_cast<std::uint32_t>(random.integer(0, 1));
      std::memcpy(wide.bytes.data() + 4 * i, &bits, 4);
    }
    copy(back, wide);
    for (std::int64_t i = 0; i < 65536; ++i) {
      float x;
      std::memcpy(&x, wide.bytes.data() + 4 * i, 4);
      const std::uint16_t expected = dtype == DType::bf16 ? BFloat16(x).bits : Float16(x).bits;
      std::uint16_t actual;
      std::memcpy(&actual, back.bytes.data() + 2 * i, 2);
      const bool both_nan = std::isnan(x) && std::isnan(back[i]);
      if (actual != expected && !both_nan)
        FAIL(dtype << ": " << x << " became " << actual << ", not " << expected);
    }
    SUCCEED();
  }
}

TEST_CASE("binary operations and scalars agree with plain arithmetic", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kAll) {
    for (int o = 0; o <= static_cast<int>(BinaryOp::tanh_backward); ++o) {
      const auto op = static_cast<BinaryOp>(o);
      const bool smooth = op == BinaryOp::pow || op >= BinaryOp::gelu_backward;
      if (!is_floating(dtype) && (smooth || op == BinaryOp::div)) continue;
      if (dtype == DType::boolean && op < BinaryOp::eq && op != BinaryOp::min &&
          op != BinaryOp::max)
        continue;
      INFO(dtype << ", op " << o);
      const std::int64_t n = 2053;
      const double a_low = op == BinaryOp::pow ? 0.1 : -3;
      const double b_low = op == BinaryOp::div ? 0.1 : -3;  // quotients fit f16
      const Array a = random.array(dtype, n, a_low, 3), b = random.array(dtype, n, b_low, 3);
      const DType out_dtype = gives_boolean(op) ? DType::boolean : dtype;
      Array out(out_dtype, n), left(out_dtype, n), right(out_dtype, n);
      const double scalar = dtype == DType::boolean ? 1 : 2;
      on_threads(
          [&](Exec& exec) {
            cpu_kernels().binary({.out = out.data(),
                                  .a = a.data(),
                                  .b = b.data(),
                                  .count = n,
                                  .shape = {},
                                  .out_strides = {},
                                  .a_strides = {},
                                  .b_strides = {},
                                  .op = op,
                                  .dtype = dtype,
                                  .ndim = 0},
                                 exec);
            ScalarArgs args{.out = left.data(),
                            .in = b.data(),
                            .scalar = scalar,
                            .count = n,
                            .shape = {},
                            .out_strides = {},
                            .in_strides = {},
                            .op = op,
                            .dtype = dtype,
                            .ndim = 0,
                            .scalar_left = true};
            cpu_kernels().scalar(args, exec);
            args.out = right.data();
            args.in = a.data();
            args.scalar_left = false;
            cpu_kernels().scalar(args, exec);
          },
          out, left, right);
      std::vector<double> expected, expected_left, expected_right;
      for (std::int64_t i = 0; i < n; ++i) {
        expected.push_back(binary_value(op, a[i], b[i]));
        expected_left.push_back(binary_value(op, scalar, b[i]));
        expected_right.push_back(binary_value(op, a[i], scalar));
      }
      // Central differences (see slope) are the reference of the derivatives: exact to 1e-9.
      const double absolute = is_floating(dtype) ? 16 * compute_epsilon(dtype) +
                                                       (op >= BinaryOp::gelu_backward ? 1e-9 : 0)
                                                 : 0;
      const double relative = is_floating(dtype) && !gives_boolean(op) ? tolerance(dtype) : 0;
      require_close(out, expected, relative, absolute);
      require_close(left, expected_left, relative, absolute);
      require_close(right, expected_right, relative, absolute);
    }
  }
}

TEST_CASE("integer division and extremes follow the contract", "[kernels]") {
  const std::int32_t a[] = {7, -7, 5, INT32_MIN, INT32_MIN}, b[] = {2, 2, 0, -1, 3};
  std::int32_t out[5];
  Exec exec;
  cpu_kernels().binary({.out = out,
                        .a = a,
                        .b = b,
                        .count = 5,
                        .shape = {},
                        .out_strides = {},
                        .a_strides = {},
                        .b_strides = {},
                        .op = BinaryOp::div,
                        .dtype = DType::i32,
                        .ndim = 0},
                       exec);
  REQUIRE((out[0] == 3 && out[1] == -3 && out[2] == 0 && out[3] == 0 && out[4] == INT32_MIN / 3));

  const float x[] = {NAN, 1, 2, NAN}, y[] = {1, NAN, 3, NAN};
  float least[4], most[4];
  for (const BinaryOp op : {BinaryOp::min, BinaryOp::max})
    cpu_kernels().binary({.out = op == BinaryOp::min ? least : most,
                          .a = x,
                          .b = y,
                          .count = 4,
                          .shape = {},
                          .out_strides = {},
                          .a_strides = {},
                          .b_strides = {},
                          .op = op,
                          .dtype = DType::f32,
                          .ndim = 0},
                         exec);
  REQUIRE((std::isnan(least[0]) && std::isnan(least[1]) && least[2] == 2 && std::isnan(least[3])));
  REQUIRE((std::isnan(most[0]) && std::isnan(most[1]) && most[2] == 3 && std::isnan(most[3])));
}
