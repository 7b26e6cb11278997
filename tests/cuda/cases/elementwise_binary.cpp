// Binary operations and operations with a scalar: equal bits where both sides do one IEEE
// operation, bounds where they call functions.
#include <cmath>
#include <limits>

#include "tests/cuda/case.hpp"

namespace cuda_test {
namespace {

constexpr DType kAll[] = {f32, bf16, f16, f64, i32, i64, boolean};

bool is_defined(BinaryOp op, DType dtype) {
  if (gives_boolean(op)) return true;
  if (dtype == boolean) return op == BinaryOp::min || op == BinaryOp::max;
  return is_floating(dtype) || op < BinaryOp::pow;
}

// pow is within 4 units (8 epsilon) on CUDA, and a correctly rounded one on the host; derivatives
// are sums of products of sigmoids, within 40 epsilon of the largest product, which is below
// |g| (1 + |x|) <= 6 for the inputs below. All others are one operation.
void check(Case& c, BinaryOp op, const Operand& y, DType dtype) {
  const bool calls = op == BinaryOp::pow || op == BinaryOp::gelu_backward ||
                     op == BinaryOp::silu_backward || op == BinaryOp::tanh_backward;
  if (!calls) return c.equal(y);
  const double compute = epsilon(dtype == f64 ? f64 : f32),
               last = size_bytes(dtype) == 2 ? 2 * epsilon(dtype) : 0;
  if (op == BinaryOp::pow) return c.close(y, 10 * compute + last, 0);
  c.close(y, last, 6 * 40 * compute + (dtype == f16 ? 0x1p-24 : 0));
}

BinaryArgs contiguous(BinaryOp op, DType dtype, std::int64_t count) {
  BinaryArgs args{};
  args.count = count;
  args.op = op;
  args.dtype = dtype;
  return args;
}

DType result(BinaryOp op, DType dtype) { return gives_boolean(op) ? boolean : dtype; }

void make_special(Operand& a, Operand& b) {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               inf = std::numeric_limits<double>::infinity();
  const double pairs[][2] = {{nan, 1}, {1, nan}, {inf, -inf}, {inf, 2},
                             {3, 0},   {0, 2},   {1, 1},      {0, 0}};
  for (std::int64_t i = 0; i < 8; ++i)
    if (is_floating(a.dtype())) a.set(i, pairs[i][0]), b.set(i, pairs[i][1]);
  if (!is_floating(a.dtype()) && a.dtype() != boolean) {
    a.set(0, a.dtype() == i32 ? -0x1p31 : -0x1p63);
    b.set(0, -1);
    b.set(1, 0);
  }
}

}  // namespace

TESSERA_CASE("elementwise", "binary operations") {
  for (int number = 0; number <= static_cast<int>(BinaryOp::tanh_backward); ++number)
    for (const DType dtype : kAll) {
      const auto op = static_cast<BinaryOp>(number);
      if (!is_defined(op, dtype)) continue;
      const auto size = static_cast<std::int64_t>(size_bytes(dtype));
      for (const std::int64_t shift : {std::int64_t{0}, size}) {
        const std::int64_t n = 517;
        const double low = op == BinaryOp::pow ? 0.1 : -2;
        Operand &a = c.input(dtype, n, low, 2), &b = c.input(dtype, n, -2, 2, shift),
                &y = c.output(result(op, dtype), n);
        if (op <= BinaryOp::max || gives_boolean(op) || op == BinaryOp::relu_backward)
          make_special(a, b);
        c.run([&](const Kernels& k, Side side, Exec& exec) {
          BinaryArgs args = contiguous(op, dtype, n);
          args.out = y.at(side);
          args.a = a.at(side);
          args.b = b.at(side);
          k.binary(args, exec);
        });
        check(c, op, y, dtype);
        c.next();
      }
    }
}

TESSERA_CASE("elementwise", "binary operations on rows, columns and scalars") {
  for (const BinaryOp op : {BinaryOp::sub, BinaryOp::lt})
    for (const DType dtype : kAll) {
      if (!is_defined(op, dtype)) continue;
      for (const std::int32_t n : {1, 64, 61}) {
        Operand &a = c.input(dtype, 6 * n), &b = c.input(dtype, n), &column = c.input(dtype, 6),
                &y = c.output(result(op, dtype), 6 * n), &z = c.output(result(op, dtype), 6 * n);
        c.run([&](const Kernels& k, Side side, Exec& exec) {
          BinaryArgs args = contiguous(op, dtype, 6 * n);
          args.ndim = 3;
          std::copy_n(std::initializer_list<std::int32_t>{2, 3, n}.begin(), 3, args.shape);
          std::copy_n(std::initializer_list<std::int32_t>{3 * n, n, 1}.begin(), 3,
                      args.out_strides);
          // a with its first two dimensions exchanged, b repeated along both.
          std::copy_n(std::initializer_list<std::int32_t>{n, 2 * n, 1}.begin(), 3, args.a_strides);
          args.b_strides[2] = 1;
          args.out = y.at(side);
          args.a = a.at(side);
          args.b = b.at(side);
          k.binary(args, exec);
          // A column repeated along the rows; both operands the other way round.
          std::swap(args.a, args.b);
          std::copy_n(std::initializer_list<std::int32_t>{3, 1, 0}.begin(), 3, args.a_strides);
          std::copy_n(std::initializer_list<std::int32_t>{3 * n, n, 1}.begin(), 3, args.b_strides);
          args.a = column.at(side);
          args.out = z.at(side);
          k.binary(args, exec);
        });
        c.equal(y);
        c.equal(z);
        c.next();
      }
    }
}

TESSERA_CASE("elementwise", "operations with a scalar") {
  for (const BinaryOp op : {BinaryOp::add, BinaryOp::div, BinaryOp::max, BinaryOp::ge,
                            BinaryOp::logical_and, BinaryOp::pow})
    for (const DType dtype : kAll)
      for (const bool left : {false, true}) {
        if (!is_defined(op, dtype)) continue;
        const std::int32_t n = 96;
        const double scalar = c.uniform(0.1, 3);
        Operand &x = c.input(dtype, 5 * n, 0.1, 2), &y = c.output(result(op, dtype), 5 * n),
                &z = c.updated(result(op, dtype), 5 * 2 * n, 0, 1);
        c.run([&](const Kernels& k, Side side, Exec& exec) {
          ScalarArgs args{};
          args.out = y.at(side);
          args.in = x.at(side);
          args.scalar = scalar;
          args.count = 5 * n;
          args.op = op;
          args.dtype = dtype;
          args.scalar_left = left;
          k.scalar(args, exec);
          args.ndim = 2;
          args.shape[0] = 5, args.shape[1] = n;
          args.in_strides[0] = n, args.in_strides[1] = 1;
          args.out_strides[0] = 2 * n, args.out_strides[1] = 1;
          args.out = z.at(side);
          k.scalar(args, exec);
        });
        check(c, op, y, dtype);
        check(c, op, z, dtype);
        c.next();
      }
}

TESSERA_CASE("elementwise", "accumulation: axpby") {
  for (const DType to : {f32, bf16, f16, f64})
    for (const DType from : {f32, bf16, f16, f64})
      for (const double beta : {0.0, 1.0, c.uniform(-1, 1)})
        for (const std::int64_t shift : {std::int64_t{0}, static_cast<std::int64_t>(8)}) {
          const std::int32_t n = 72, rows = 7;
          Operand &x = c.input(from, rows * n, -2, 2, shift),
                  &y = beta == 0 ? c.output(to, rows * n) : c.updated(to, rows * n),
                  &z = c.updated(to, rows * 2 * n);
          const double alpha = c.uniform(-1, 1);
          c.run([&](const Kernels& k, Side side, Exec& exec) {
            AxpbyArgs args{};
            args.y = y.at(side);
            args.x = x.at(side);
            args.alpha = alpha;
            args.beta = beta;
            args.count = rows * n - 1;
            args.y_dtype = to;
            args.x_dtype = from;
            k.axpby(args, exec);
            args.y = z.at(side);
            args.count = rows * n;
            args.ndim = 2;
            args.shape[0] = rows, args.shape[1] = n;
            args.y_strides[0] = 2 * n, args.y_strides[1] = 1;
            args.x_strides[0] = 0, args.x_strides[1] = 1;  // a row, repeated
            k.axpby(args, exec);
          });
          // |alpha x| + |beta y| <= 4, two roundings of the computing type apart without a fused
          // multiply-add, and one unit of a 16-bit result.
          const double compute = epsilon(to == f64 || from == f64 ? f64 : f32);
          const double last = to == f64 ? 0 : 2 * epsilon(to);
          c.close(y, last, 4 * 2 * compute);
          c.close(z, last, 4 * 2 * compute);
          c.next();
        }
}

}  // namespace cuda_test
