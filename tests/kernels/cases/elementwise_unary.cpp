// Unary operations against the standard library: floats in bounds that the formulas derive,
// integers exact.
#include "kernels/formulas.hpp"
#include "tests/kernels/bounded.hpp"
#include "tests/kernels/strided.hpp"
#include "tests/kernels/unary_reference.hpp"

namespace kernel_test {
namespace {

void near_unary(Case& c, const Operand& y, std::int64_t i, UnaryOp op, double x) {
  if (!is_floating(y.dtype())) return c.near(y, i, unary_in_f64(op, x), 0);
  in_compute_type(y.dtype(), [&]<class C>(C) {
    visit_formula(op, [&]<class F>(F) {
      if constexpr (has_floats<F, Bounded<C>>())
        c.near(y, i, unary_in_f64(op, x), stored_error(y.dtype(), F::floats(Bounded<C>::given(x))));
    });
  });
}

void check_unary(Case& c, UnaryOp op, DType dtype, std::int64_t n, bool shifted) {
  const bool positive = op == UnaryOp::log || op == UnaryOp::sqrt || op == UnaryOp::rsqrt;
  Operand &x = c.input(dtype, n, positive ? 0.01 : -8, 8, shift_of(dtype, shifted)),
          &y = c.output(dtype, n);
  const double inf = std::numeric_limits<double>::infinity(), nan = inf - inf;
  const double special[] = {inf, -inf, nan, 0, 1000, -1000, 1e-30, -1, 1, -20, -80, 10, inf, nan};
  for (std::int64_t i = 0; n > 20 && i < std::ssize(special); ++i) x.set(i, special[i]);
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    UnaryArgs args{};
    args.out = y.at(side);
    args.in = x.at(side);
    args.count = n;
    args.op = op;
    args.out_dtype = args.in_dtype = dtype;
    k.unary(args, exec);
  });
  for (std::int64_t i = 0; i < n; ++i) near_unary(c, y, i, op, x.get(i));
  c.next();
}

}  // namespace

TESSERA_CASE("elementwise", "unary operations on floats") {
  for (int number = static_cast<int>(UnaryOp::neg); number < static_cast<int>(UnaryOp::logical_not);
       ++number)
    for (const DType dtype : kFloats) {
      const auto op = static_cast<UnaryOp>(number);
      for (const std::int64_t n : {0, 1, 7, 8, 9, 1029}) check_unary(c, op, dtype, n, false);
      check_unary(c, op, dtype, 1029, true);
      check_unary(c, op, dtype, dtype == f32 ? 40001 : 4099, false);
    }
}

TESSERA_CASE("elementwise", "sine and cosine of large angles") {
  for (const UnaryOp op : {UnaryOp::sin, UnaryOp::cos})
    for (const DType dtype : {f32, f64}) {
      const std::int64_t n = 2000;
      Operand &x = c.input(dtype, n, -0x1p31, 0x1p31), &y = c.output(dtype, n);
      for (std::int64_t i = 0; i < n / 2; ++i)  // near where one of them is 0
        x.set(i, static_cast<double>(c.integer(-100000, 100000)) * (M_PI / 2));
      c.compute([&](const Kernels& k, Side side, Exec& exec) {
        UnaryArgs args{};
        args.out = y.at(side);
        args.in = x.at(side);
        args.count = n;
        args.op = op;
        args.out_dtype = args.in_dtype = dtype;
        k.unary(args, exec);
      });
      for (std::int64_t i = 0; i < n; ++i) near_unary(c, y, i, op, x.get(i));
      c.next();
    }
}

TESSERA_CASE("elementwise", "unary operations on integers and strided views") {
  for (const DType dtype : {i32, i64, f32, bf16})
    for (const UnaryOp op :
         {UnaryOp::neg, UnaryOp::abs, UnaryOp::sign, UnaryOp::floor, UnaryOp::round}) {
      for (const std::int32_t n : {96, 93}) {
        Operand &x = c.input(dtype, 6 * 96, -9, 9), &y = c.updated(dtype, 6 * 96, 0, 1);
        if (dtype == i32) x.set(0, -0x1p31);
        if (dtype == i64) x.set(0, -0x1p63);
        const UnaryArgs args{.out = nullptr,
                             .in = nullptr,
                             .count = 6 * n,
                             .shape = {2, 3, n},
                             .out_strides = {96, 192, 1},
                             .in_strides = {288, 96, 1},
                             .op = op,
                             .out_dtype = dtype,
                             .in_dtype = dtype,
                             .ndim = 3};
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          UnaryArgs here = args;
          here.out = y.at(side);
          here.in = x.at(side);
          k.unary(here, exec);
        });
        std::vector<bool> written(static_cast<std::size_t>(y.size()));
        for (std::int64_t i = 0; i < args.count; ++i) {
          const std::int64_t to = offset_in(i, 3, args.shape, args.out_strides);
          const double value = x.get(offset_in(i, 3, args.shape, args.in_strides));
          written[static_cast<std::size_t>(to)] = true;
          const bool turns = op == UnaryOp::neg || op == UnaryOp::abs;
          if (turns && value == (dtype == i32 ? -0x1p31 : -0x1p63))  // has no opposite
            c.near(y, to, value, 0);
          else
            near_unary(c, y, to, op, value);
        }
        for (std::int64_t i = 0; i < y.size(); ++i)
          if (!written[static_cast<std::size_t>(i)]) c.near(y, i, y.get(i), 0);
        c.next();
      }
    }
}

}  // namespace kernel_test
