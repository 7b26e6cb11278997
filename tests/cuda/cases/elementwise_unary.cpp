// Unary operations with values: floats in bounds, integers with equal bits.
#include <cmath>
#include <limits>

#include "tests/cuda/case.hpp"

namespace cuda_test {
namespace {

struct Bounded {
  UnaryOp op;
  double low, high;  // inputs
  double roundings;  // of the computing type, both sides together
};

// What CUDA documents for f32 (the largest error in units in the last place, each two `epsilon`):
// exp 2, log 1, tanh 2, division by fast_quotient 2, square root and division 0; Eigen's vectors
// on the other side are within 2 (exp, log) and 7 (tanh). Sigmoid adds one rounding of 1 + exp.
// Where the argument of exp is a rounded product with |x| <= 8, its error counts 8 times
// (gelu: three roundings). f64 functions are within 2 units.
constexpr Bounded kFloating[] = {
    {UnaryOp::neg, -2, 2, 0},     {UnaryOp::abs, -2, 2, 0},        {UnaryOp::relu, -2, 2, 0},
    {UnaryOp::sqrt, 0, 9, 2},     {UnaryOp::rsqrt, 0.1, 9, 4},     {UnaryOp::exp, -20, 20, 10},
    {UnaryOp::log, 1.5, 90, 8},   {UnaryOp::tanh, -4, 4, 20},      {UnaryOp::gelu, -3, 3, 80},
    {UnaryOp::silu, -20, 20, 20}, {UnaryOp::sigmoid, -20, 20, 20},
};

}  // namespace

TESSERA_CASE("elementwise", "unary operations on floats") {
  for (const Bounded& one : kFloating)
    for (const DType dtype : {f32, bf16, f16, f64}) {
      const auto size = static_cast<std::int64_t>(size_bytes(dtype));
      for (const std::int64_t shift : {std::int64_t{0}, size}) {
        constexpr std::int64_t n = 1029;
        Operand &x = c.input(dtype, n, one.low, one.high, shift), &y = c.output(dtype, n);
        x.set(0, std::numeric_limits<double>::quiet_NaN());
        x.set(1, 0);
        x.set(2, std::numeric_limits<double>::infinity());
        c.run([&](const Kernels& k, Side side, Exec& exec) {
          UnaryArgs args{};
          args.out = y.at(side);
          args.in = x.at(side);
          args.count = n;
          args.op = one.op;
          args.out_dtype = args.in_dtype = dtype;
          k.unary(args, exec);
        });
        // A 16-bit result is f32's, rounded once on each side: at most one unit apart.
        const bool narrow = size == 2;
        const double compute = epsilon(narrow ? f32 : dtype);
        c.close(y, one.roundings * compute + (narrow && one.roundings > 0 ? 2 * epsilon(dtype) : 0),
                dtype == f16 && one.roundings > 0 ? 0x1p-24 : 0x1p-126);
        c.next();
      }
    }
}

TESSERA_CASE("elementwise", "unary operations on integers and strided views") {
  for (const DType dtype : {i32, i64, f32, bf16})
    for (const UnaryOp op : {UnaryOp::neg, UnaryOp::abs}) {
      Operand &x = c.input(dtype, 6 * 96, -9, 9), &y = c.updated(dtype, 6 * 96, 0, 1);
      if (dtype == i32) x.set(0, -0x1p31);
      if (dtype == i64) x.set(0, -0x1p63);
      for (const std::int32_t n : {96, 93}) {
        c.run([&](const Kernels& k, Side side, Exec& exec) {
          k.unary({.out = y.at(side),
                   .in = x.at(side),
                   .count = 6 * n,
                   .shape = {2, 3, n},
                   .out_strides = {96, 192, 1},
                   .in_strides = {288, 96, 1},
                   .op = op,
                   .out_dtype = dtype,
                   .in_dtype = dtype,
                   .ndim = 3},
                  exec);
        });
        c.equal(y);
      }
      c.next();
    }
}

}  // namespace cuda_test
