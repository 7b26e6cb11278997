// Binary operations and operations with a scalar: exact where a kernel does one IEEE operation,
// in bounds that the formulas derive where it does more.
#include "kernels/formulas.hpp"
#include "tests/kernels/bounded.hpp"
#include "tests/kernels/strided.hpp"
#include "tests/kernels/unary_reference.hpp"

namespace kernel_test {
namespace {

constexpr BinaryOp kOps[] = {
#define TESSERA_BINARY(name, ...) BinaryOp::name,
#include "tessera/kernels/binary.def"
};

bool is_defined(BinaryOp op, DType dtype) {
  if (gives_boolean(op)) return true;
  if (dtype == boolean) return op == BinaryOp::min || op == BinaryOp::max;
  return is_floating(dtype) || op < BinaryOp::pow;
}

// Sums and products of integers wrap; a quotient is truncated, or 0 where there is none.
template <class I>
double integer_result(BinaryOp op, I x, I y) {
  using U = std::make_unsigned_t<I>;
  const auto a = static_cast<U>(x), b = static_cast<U>(y);
  if (op == BinaryOp::add) return static_cast<double>(static_cast<I>(a + b));
  if (op == BinaryOp::sub) return static_cast<double>(static_cast<I>(a - b));
  if (op == BinaryOp::mul) return static_cast<double>(static_cast<I>(a * b));
  if (op == BinaryOp::min) return static_cast<double>(x < y ? x : y);
  if (op == BinaryOp::max) return static_cast<double>(x > y ? x : y);
  if (y == 0 || (y == I(-1) && x == std::numeric_limits<I>::min())) return 0;
  return static_cast<double>(x / y);
}

double binary_in_f64(BinaryOp op, double a, double b) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
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
      return std::isnan(a) || std::isnan(b) ? nan : std::min(a, b);
    case BinaryOp::max:
      return std::isnan(a) || std::isnan(b) ? nan : std::max(a, b);
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
    default:
      return slope_in_f64(op, a, b);
  }
}

// y[i] is op(a, b) of elements of `dtype`.
void near_binary(Case& c, const Operand& y, std::int64_t i, BinaryOp op, DType dtype, double a,
                 double b) {
  if (gives_boolean(op)) return c.near(y, i, binary_in_f64(op, a, b), 0);
  if (dtype == i32)
    return c.near(
        y, i, integer_result(op, static_cast<std::int32_t>(a), static_cast<std::int32_t>(b)), 0);
  if (!is_floating(dtype))
    return c.near(
        y, i, integer_result(op, static_cast<std::int64_t>(a), static_cast<std::int64_t>(b)), 0);
  // f64 rounds a sum, product or quotient of f32 so finely that rounding it again is rounding once.
  if (op < BinaryOp::pow || op == BinaryOp::relu_backward)
    return c.near(y, i, rounded_to(dtype, rounded_to(computed_in(dtype), binary_in_f64(op, a, b))),
                  0);
  in_compute_type(dtype, [&]<class C>(C) {
    visit_formula(op, [&]<class F>(F) {
      if constexpr (F::op == BinaryOp::pow || is_slope(F::op))
        c.near(y, i, binary_in_f64(op, a, b),
               stored_error(dtype, F::floats(Bounded<C>::given(a), Bounded<C>::given(b))));
    });
  });
}

BinaryArgs contiguous_binary(BinaryOp op, DType dtype, std::int64_t count) {
  BinaryArgs args{};
  args.count = count;
  args.op = op;
  args.dtype = dtype;
  return args;
}

DType dtype_of_result(BinaryOp op, DType dtype) { return gives_boolean(op) ? boolean : dtype; }

void make_special_pairs(Operand& a, Operand& b) {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               inf = std::numeric_limits<double>::infinity();
  const double pairs[][2] = {{nan, 1}, {1, nan}, {inf, -inf}, {inf, 2},  {3, 0},
                             {0, 2},   {1, 1},   {0, 0},      {nan, nan}};
  for (std::int64_t i = 0; i < std::ssize(pairs); ++i)
    if (is_floating(a.dtype())) a.set(i, pairs[i][0]), b.set(i, pairs[i][1]);
  if (is_floating(a.dtype()) || a.dtype() == boolean) return;
  const double least = a.dtype() == i32 ? -0x1p31 : -0x1p63;
  const double whole[][2] = {{least, -1}, {5, 0}, {7, 2}, {-7, 2}, {least, 3}, {7, -2}};
  for (std::int64_t i = 0; i < std::ssize(whole); ++i) a.set(i, whole[i][0]), b.set(i, whole[i][1]);
}

// Of operations on floats, those that take any number.
bool takes_special(BinaryOp op) {
  return op < BinaryOp::pow || gives_boolean(op) || op == BinaryOp::relu_backward;
}

}  // namespace

TESSERA_CASE("elementwise", "binary operations") {
  for (const BinaryOp op : kOps)
    for (const DType dtype : kAll) {
      if (!is_defined(op, dtype)) continue;
      for (const std::int64_t n : {0, 1, 517, 2053}) {
        const double low = op == BinaryOp::pow ? 0.1 : -3;
        Operand &a = c.input(dtype, n, low, 3),
                &b = c.input(dtype, n, -3, 3, shift_of(dtype, n == 517)),
                &y = c.output(dtype_of_result(op, dtype), n);
        if (n > 10 && takes_special(op)) make_special_pairs(a, b);
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          BinaryArgs args = contiguous_binary(op, dtype, n);
          args.out = y.at(side);
          args.a = a.at(side);
          args.b = b.at(side);
          k.binary(args, exec);
        });
        for (std::int64_t i = 0; i < n; ++i) near_binary(c, y, i, op, dtype, a.get(i), b.get(i));
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
                &y = c.output(dtype_of_result(op, dtype), 6 * n),
                &z = c.output(dtype_of_result(op, dtype), 6 * n);
        BinaryArgs args = contiguous_binary(op, dtype, 6 * n);
        args.ndim = 3;
        const auto put = [](std::int32_t* to, std::initializer_list<std::int32_t> from) {
          std::copy(from.begin(), from.end(), to);
        };
        put(args.shape, {2, 3, n});
        put(args.out_strides, {3 * n, n, 1});
        // a with its first two dimensions exchanged, b repeated along both; then a column repeated
        // along the rows, and a in order.
        BinaryArgs other = args;
        put(args.a_strides, {n, 2 * n, 1});
        put(args.b_strides, {0, 0, 1});
        put(other.a_strides, {3, 1, 0});
        put(other.b_strides, {3 * n, n, 1});
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          args.out = y.at(side);
          args.a = a.at(side);
          args.b = b.at(side);
          k.binary(args, exec);
          other.out = z.at(side);
          other.a = column.at(side);
          other.b = a.at(side);
          k.binary(other, exec);
        });
        for (std::int64_t i = 0; i < 6 * n; ++i) {
          const auto at = [&](const std::int32_t* strides) {
            return offset_in(i, 3, args.shape, strides);
          };
          near_binary(c, y, i, op, dtype, a.get(at(args.a_strides)), b.get(at(args.b_strides)));
          near_binary(c, z, i, op, dtype, column.get(at(other.a_strides)),
                      a.get(at(other.b_strides)));
        }
        c.next();
      }
    }
}

TESSERA_CASE("elementwise", "operations with a scalar") {
  for (const BinaryOp op : kOps)
    for (const DType dtype : kAll)
      for (const bool left : {false, true}) {
        if (!is_defined(op, dtype)) continue;
        const std::int32_t rows = 5, n = 96;
        const double drawn = c.uniform(0.1, 3);
        Operand &x = c.input(dtype, rows * n, 0.1, 2),
                &y = c.output(dtype_of_result(op, dtype), rows * n),
                &z = c.updated(dtype_of_result(op, dtype), rows * 2 * n, 0, 1);
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          ScalarArgs args{};
          args.out = y.at(side);
          args.in = x.at(side);
          args.scalar = drawn;
          args.count = rows * n;
          args.op = op;
          args.dtype = dtype;
          args.scalar_left = left;
          k.scalar(args, exec);
          args.ndim = 2;
          args.shape[0] = rows, args.shape[1] = n;
          args.in_strides[0] = n, args.in_strides[1] = 1;
          args.out_strides[0] = 2 * n, args.out_strides[1] = 1;
          args.out = z.at(side);
          k.scalar(args, exec);
        });
        // Rounded to the computing type first.
        const double scalar = cast_to(is_floating(dtype) ? computed_in(dtype) : dtype, drawn);
        for (std::int64_t i = 0; i < rows * n; ++i) {
          const double a = left ? scalar : x.get(i), b = left ? x.get(i) : scalar;
          const std::int64_t to = i / n * 2 * n + i % n;
          near_binary(c, y, i, op, dtype, a, b);
          near_binary(c, z, to, op, dtype, a, b);
          c.near(z, to + n, z.get(to + n), 0);
        }
        c.next();
      }
}

TESSERA_CASE("elementwise", "accumulation: axpby") {
  for (const DType to : kFloats)
    for (const DType from : kFloats)
      for (const double beta : {0.0, 1.0, c.uniform(-1, 1)})
        for (const bool shifted : {false, true}) {
          const std::int32_t n = 72, rows = 37;
          Operand &x = c.input(from, rows * n, -2, 2, shift_of(from, shifted)),
                  &y = beta == 0 ? c.output(to, rows * n) : c.updated(to, rows * n),
                  &transposed = beta == 0 ? c.output(to, rows * n) : c.updated(to, rows * n),
                  &z = c.updated(to, rows * 2 * n);
          const double alpha = c.uniform(-1, 1);
          c.compute([&](const Kernels& k, Side side, Exec& exec) {
            AxpbyArgs args{};
            args.y = y.at(side);
            args.x = x.at(side);
            args.alpha = alpha;
            args.beta = beta;
            args.count = rows * n - 1;
            args.y_dtype = to;
            args.x_dtype = from;
            k.axpby(args, exec);
            args.count = rows * n;
            args.ndim = 2;
            args.shape[0] = rows, args.shape[1] = n;
            args.y = transposed.at(side);
            args.y_strides[0] = n, args.y_strides[1] = 1;
            args.x_strides[0] = 1, args.x_strides[1] = rows;
            k.axpby(args, exec);
            args.y = z.at(side);
            args.y_strides[0] = 2 * n, args.y_strides[1] = 1;
            args.x_strides[0] = 0, args.x_strides[1] = 1;  // a row, repeated
            k.axpby(args, exec);
          });
          in_compute_type(to == f64 || from == f64 ? f64 : f32, [&]<class C>(C) {
            using B = Bounded<C>;
            const auto factor = [](double given) {
              return B::given(static_cast<double>(static_cast<C>(given)));
            };
            const auto compare = [&](const Operand& out, std::int64_t i, std::int64_t at) {
              const B added = factor(alpha) * B::given(x.get(at));
              near(c, out, i, beta == 0 ? added : added + factor(beta) * B::given(out.get(i)));
            };
            for (std::int64_t i = 0; i < rows * n; ++i) {
              const std::int64_t row = i / n, column = i % n, wide = row * 2 * n + column;
              if (i + 1 < rows * n) compare(y, i, i);
              compare(transposed, i, column * rows + row);
              compare(z, wide, column);
              c.near(z, wide + n, z.get(wide + n), 0);
            }
            c.near(y, rows * n - 1, y.get(rows * n - 1), 0);
          });
          c.next();
        }
}

}  // namespace kernel_test
