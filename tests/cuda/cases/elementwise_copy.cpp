// Copies, casts, fill, arange and where move or round values as the CPU does: equal bits (of a NaN,
// only that it is one).
#include <limits>

#include "tests/cuda/case.hpp"

namespace cuda_test {
namespace {

constexpr DType kAll[] = {f32, bf16, f16, f64, i32, i64, boolean};

// Values at which casts saturate, overflow, round to even or lose a sign.
void make_special(Operand& x) {
  const double inf = std::numeric_limits<double>::infinity();
  const double values[] = {0.0,   -0.0,  inf,     -inf,  std::numeric_limits<double>::quiet_NaN(),
                           0.5,   -0.5,  65520,   1e-7,  -3e9,
                           3e9,   1e19,  -1e19,   1.003, 1e-40,
                           257.0, 2.999, 16777217};
  const std::int64_t n = std::min<std::int64_t>(x.size(), std::size(values));
  for (std::int64_t i = 0; i < n; ++i)
    if (is_floating(x.dtype())) x.set(i, values[i]);
  if (x.dtype() == i64 && n > 1) {
    x.set(0, 0x1p62 + 0x1p37);  // between two floats
    x.set(1, -9007199254740994.0);
  }
}

// A view of [2, 3, n] in memory [3, 2, padded]: the first two dimensions exchanged.
UnaryArgs exchanged(std::int32_t n, std::int32_t padded) {
  UnaryArgs args{};
  args.count = std::int64_t{6} * n;
  args.ndim = 3;
  const std::int32_t shape[] = {2, 3, n}, in[] = {padded, 2 * padded, 1}, out[] = {3 * n, n, 1};
  std::copy_n(shape, 3, args.shape);
  std::copy_n(in, 3, args.in_strides);
  std::copy_n(out, 3, args.out_strides);
  return args;
}

UnaryArgs contiguous(UnaryOp op, std::int64_t count) {
  UnaryArgs args{};
  args.op = op;
  args.count = count;
  return args;
}

void run_unary(Case& c, UnaryArgs args, Operand& out, Operand& in) {
  args.out_dtype = out.dtype();
  args.in_dtype = in.dtype();
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    args.out = out.at(side);
    args.in = in.at(side);
    k.unary(args, exec);
  });
}

}  // namespace

TESSERA_CASE("elementwise", "casts from every dtype to every dtype") {
  for (const DType from : kAll)
    for (const DType to : kAll)
      for (const std::int64_t n : {std::int64_t{1}, std::int64_t{37}, c.integer(1020, 1060)}) {
        Operand &x = c.input(from, n, -100, 100), &y = c.output(to, n);
        if (n > 1) make_special(x);
        run_unary(c, contiguous(UnaryOp::copy, n), y, x);
        c.equal(y);
        c.next();
      }
}

TESSERA_CASE("elementwise", "copies of misaligned and of strided views") {
  for (const DType from : {f32, bf16, i64, boolean})
    for (const DType to : {from, f16}) {
      const auto shift = static_cast<std::int64_t>(size_bytes(from));
      Operand &x = c.input(from, 1031, -2, 2, shift), &y = c.output(to, 1031);
      run_unary(c, contiguous(UnaryOp::copy, 1031), y, x);
      c.equal(y);
      c.next();
      // Rows of whole packs; rows that are not; rows of which one lies misaligned.
      for (const auto& [n, padded] : {std::pair{64, 64}, std::pair{35, 64}, std::pair{64, 67}}) {
        Operand &a = c.input(from, 6 * padded), &b = c.output(to, std::int64_t{6} * n);
        UnaryArgs args = exchanged(n, padded);
        args.op = UnaryOp::copy;
        run_unary(c, args, b, a);
        c.equal(b);
        c.next();
      }
      // Into every third column; from one column, repeated.
      Operand &a = c.input(from, 40), &b = c.updated(to, 3 * 16 * 40, 0, 1);
      UnaryArgs args = contiguous(UnaryOp::copy, 640);
      args.ndim = 2;
      args.shape[0] = 40, args.shape[1] = 16;
      args.out_strides[0] = 48, args.out_strides[1] = 3;
      args.in_strides[0] = 1;
      run_unary(c, args, b, a);
      c.equal(b);
      args.out_strides[0] = 16, args.out_strides[1] = 1;
      run_unary(c, args, b, a);
      c.equal(b);
      c.next();
    }
}

TESSERA_CASE("elementwise", "what gives boolean") {
  for (const DType from : kAll)
    for (const UnaryOp op : {UnaryOp::logical_not, UnaryOp::isfinite}) {
      if (op == UnaryOp::isfinite && !is_floating(from)) continue;
      Operand &x = c.input(from, 1029, -1, 1), &y = c.output(boolean, 1029);
      make_special(x);
      run_unary(c, contiguous(op, 1029), y, x);
      c.equal(y);
    }
}

TESSERA_CASE("elementwise", "fill and arange") {
  for (const DType dtype : kAll) {
    const auto shift = static_cast<std::int64_t>(size_bytes(dtype));
    for (const double value : {c.uniform(-300, 300), 0.0, 1e30, -1e30})
      for (const std::int64_t shifted : {std::int64_t{0}, shift}) {
        Operand &y = c.output(dtype, 1037, shifted), &rows = c.updated(dtype, 5 * 64, 0, 1);
        c.run([&](const Kernels& k, Side side, Exec& exec) {
          FillArgs args{};
          args.out = y.at(side);
          args.value = value;
          args.count = 1037;
          args.dtype = dtype;
          k.fill(args, exec);
          args.out = rows.at(side);
          args.count = 5 * 32;
          args.ndim = 2;
          args.shape[0] = 5, args.shape[1] = 32;
          args.out_strides[0] = 64, args.out_strides[1] = 1;
          k.fill(args, exec);
        });
        c.equal(y);
        c.equal(rows);
        c.next();
      }
    Operand& y = c.output(dtype, 1000);
    const double start = c.uniform(-9, 9), step = c.uniform(-1, 1);
    c.run([&](const Kernels& k, Side side, Exec& exec) {
      k.arange({.out = y.at(side), .start = start, .step = step, .count = 1000, .dtype = dtype},
               exec);
    });
    c.equal(y);
    c.next();
  }
}

TESSERA_CASE("elementwise", "where") {
  for (const DType dtype : kAll)
    for (const std::int32_t n : {1, 64, 61}) {
      Operand &condition = c.input(boolean, 4 * n), &a = c.input(dtype, 4 * n),
              &b = c.input(dtype, n), &y = c.output(dtype, 4 * n), &z = c.output(dtype, 4 * n);
      c.run([&](const Kernels& k, Side side, Exec& exec) {
        // b repeats along the rows.
        k.where({.out = y.at(side),
                 .condition = condition.at(side),
                 .a = a.at(side),
                 .b = b.at(side),
                 .shape = {4, n},
                 .condition_strides = {n, 1},
                 .a_strides = {n, 1},
                 .b_strides = {0, 1},
                 .dtype = dtype,
                 .ndim = 2},
                exec);
        // One condition for each row, a transposed.
        k.where({.out = z.at(side),
                 .condition = condition.at(side),
                 .a = a.at(side),
                 .b = b.at(side),
                 .shape = {4, n},
                 .condition_strides = {1, 0},
                 .a_strides = {1, 4},
                 .b_strides = {0, 0},
                 .dtype = dtype,
                 .ndim = 2},
                exec);
      });
      c.equal(y);
      c.equal(z);
      c.next();
    }
}

}  // namespace cuda_test
