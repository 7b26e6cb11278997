// Copies, casts, fill, arange and where move or round values: exact.
#include <cstring>

#include "tests/kernels/bounded.hpp"
#include "tests/kernels/strided.hpp"

namespace kernel_test {
namespace {

// With those in which nothing is computed.
const DType kHeld[] = {f32, bf16, f16, f64, i32, i64, boolean, e4m3, e5m2, u8};

UnaryArgs contiguous_unary(UnaryOp op, std::int64_t count) {
  UnaryArgs args{};
  args.op = op;
  args.count = count;
  return args;
}

void run_unary(Case& c, UnaryArgs args, Operand& out, Operand& in) {
  args.out_dtype = out.dtype();
  args.in_dtype = in.dtype();
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    args.out = out.at(side);
    args.in = in.at(side);
    k.unary(args, exec);
  });
}

// y[i] has the bits of `expected`; a NaN is any NaN.
void exactly(Case& c, const Operand& y, std::int64_t i, double expected) {
  c.near(y, i, expected, 0);
  const double actual = c.on_device(y, i);
  if (!std::isnan(expected) && std::signbit(actual) != std::signbit(expected))
    c.fail(concat("element ", i, " (", y.dtype(), ") is ", actual, " instead of ", expected));
  // Its double is a number above it.
  if (y.dtype() == i64 && expected == 0x1p63 && c.bits<std::int64_t>(y, i) != INT64_MAX)
    c.fail(concat("element ", i, " is not the largest integer"));
}

// A copy under `args`' strides, elements between those of `out` as before.
void check_copy(Case& c, const UnaryArgs& args, Operand& out, Operand& in) {
  run_unary(c, args, out, in);
  std::vector<double> expected;
  for (std::int64_t i = 0; i < out.size(); ++i) expected.push_back(out.get(i));
  for (std::int64_t i = 0; i < args.count; ++i) {
    const bool flat = args.ndim == 0;
    const std::int64_t from = flat ? i : offset_in(i, args.ndim, args.shape, args.in_strides),
                       to = flat ? i : offset_in(i, args.ndim, args.shape, args.out_strides);
    const double x = in.get(from);  // integers wrap
    expected[static_cast<std::size_t>(to)] =
        in.dtype() == i64 && out.dtype() == i32
            ? static_cast<std::int32_t>(static_cast<std::int64_t>(x))
        : !is_floating(in.dtype()) && out.dtype() == u8
            ? static_cast<std::uint8_t>(static_cast<std::int64_t>(x))
            : cast_to(out.dtype(), x);
  }
  for (std::int64_t i = 0; i < out.size(); ++i)
    exactly(c, out, i, expected[static_cast<std::size_t>(i)]);
}

}  // namespace

TESSERA_CASE("elementwise", "casts from every dtype to every dtype") {
  for (const DType from : kHeld)
    for (const DType to : kHeld)
      for (const std::int64_t n :
           {std::int64_t{0}, std::int64_t{1}, std::int64_t{37}, c.integer(1020, 1060)}) {
        Operand &x = c.input(from, n, -100, 100), &y = c.output(to, n);
        if (n > 1) make_special(x);
        check_copy(c, contiguous_unary(UnaryOp::copy, n), y, x);
        c.next();
      }
}

TESSERA_CASE("elementwise", "copies of misaligned and of strided views") {
  for (const DType from : {f32, bf16, i64, boolean, e4m3, u8})
    for (const DType to : {from, f16, e5m2}) {
      Operand &x = c.input(from, 1031, -2, 2, shift_of(from, true)), &y = c.output(to, 1031);
      check_copy(c, contiguous_unary(UnaryOp::copy, 1031), y, x);
      c.next();
      // Rows of whole packs; rows that are not; rows of which one lies misaligned. A view of
      // [2, 3, n] in memory [3, 2, padded]: the first two dimensions exchanged.
      for (const auto& [n, padded] : {std::pair{64, 64}, std::pair{35, 64}, std::pair{64, 67}}) {
        Operand &a = c.input(from, 6 * padded), &b = c.output(to, std::int64_t{6} * n);
        const UnaryArgs args{.out = nullptr,
                             .in = nullptr,
                             .count = std::int64_t{6} * n,
                             .shape = {2, 3, n},
                             .out_strides = {3 * n, n, 1},
                             .in_strides = {padded, 2 * padded, 1},
                             .op = UnaryOp::copy,
                             .out_dtype = to,
                             .in_dtype = from,
                             .ndim = 3};
        check_copy(c, args, b, a);
        c.next();
      }
      // Into every third column; from one column, repeated.
      Operand &a = c.input(from, 40), &b = c.updated(to, 3 * 16 * 40, 0, 1);
      UnaryArgs args = contiguous_unary(UnaryOp::copy, 640);
      args.ndim = 2;
      args.shape[0] = 40, args.shape[1] = 16;
      args.out_strides[0] = 48, args.out_strides[1] = 3;
      args.in_strides[0] = 1;
      check_copy(c, args, b, a);
      args.out_strides[0] = 16, args.out_strides[1] = 1;
      check_copy(c, args, b, a);
      c.next();
    }
}

// Around every value: ties, to nearest even, just below and just above.
TESSERA_CASE("elementwise",
             "conversions of every pattern of 16 and 8 bits agree with the scalars") {
  for (const DType dtype : {bf16, f16, e4m3, e5m2})
    visit(dtype, [&]<class T>(TypeTag<T>) {
      if constexpr (std::is_class_v<T>) {
        constexpr std::int64_t n = 65536;  // each of 8 bits 256 times
        constexpr int half = sizeof(T) == 2 ? 0x8000 : dtype_of<T>() == e4m3 ? 0x80000 : 0x100000;
        constexpr auto tie = static_cast<std::uint32_t>(sizeof(T) == 2 ? 0x1000 : half);
        Operand &narrow = c.input(dtype, n), &wide = c.output(f32, n);
        for (std::int64_t i = 0; i < n; ++i)
          narrow.at<T>(Side::reference)[i].bits = static_cast<decltype(T::bits)>(i);
        check_copy(c, contiguous_unary(UnaryOp::copy, n), wide, narrow);
        Operand &around = c.input(f32, n), &back = c.output(dtype, n);
        for (std::int64_t i = 0; i < n; ++i) {
          auto bits = c.bits<std::uint32_t>(wide, i);
          bits += static_cast<std::uint32_t>(c.integer(-half - 1, half + 1));
          if (i % 3 == 0)
            bits = (bits & ~(tie - 1)) + tie * static_cast<std::uint32_t>(c.integer(0, 1));
          std::memcpy(around.at<float>(Side::reference) + i, &bits, sizeof bits);
        }
        run_unary(c, contiguous_unary(UnaryOp::copy, n), back, around);
        for (std::int64_t i = 0; i < n; ++i) exactly(c, back, i, rounded_to(dtype, around.get(i)));
        c.next();
      }
    });
}

TESSERA_CASE("elementwise", "what gives boolean") {
  for (const DType from : kAll)
    for (const UnaryOp op : {UnaryOp::logical_not, UnaryOp::isfinite}) {
      if (op == UnaryOp::isfinite && !is_floating(from)) continue;
      Operand &x = c.input(from, 1029, -1, 1), &y = c.output(boolean, 1029);
      make_special(x);
      run_unary(c, contiguous_unary(op, 1029), y, x);
      for (std::int64_t i = 0; i < x.size(); ++i)
        c.near(y, i, op == UnaryOp::isfinite ? std::isfinite(x.get(i)) : x.get(i) == 0, 0);
      c.next();
    }
}

TESSERA_CASE("elementwise", "fill and arange") {
  for (const DType dtype : kHeld) {
    for (const double value : {c.uniform(-300, 300), 0.0, 1e30, -1e30})
      for (const bool shifted : {false, true}) {
        Operand &y = c.output(dtype, 3001, shift_of(dtype, shifted)),
                &rows = c.updated(dtype, 5 * 64, 0, 1), &columns = c.updated(dtype, 40, 0, 1);
        c.compute([&](const Kernels& k, Side side, Exec& exec) {
          FillArgs args{};
          args.out = y.at(side);
          args.value = value;
          args.count = 3001;
          args.dtype = dtype;
          k.fill(args, exec);
          args.out = rows.at(side);
          args.count = 5 * 32;
          args.ndim = 2;
          args.shape[0] = 5, args.shape[1] = 32;
          args.out_strides[0] = 64, args.out_strides[1] = 1;
          k.fill(args, exec);
          args.out = columns.at(side);
          args.count = 5 * 4;
          args.shape[0] = 5, args.shape[1] = 4;
          args.out_strides[0] = 8, args.out_strides[1] = 2;
          k.fill(args, exec);
        });
        const double expected = cast_to(dtype, value);
        for (std::int64_t i = 0; i < y.size(); ++i) exactly(c, y, i, expected);
        for (std::int64_t i = 0; i < rows.size(); ++i)
          exactly(c, rows, i, i % 64 < 32 ? expected : rows.get(i));
        for (std::int64_t i = 0; i < columns.size(); ++i)
          exactly(c, columns, i, i % 2 == 0 ? expected : columns.get(i));
        c.next();
      }
    if (is_storage_only(dtype)) continue;
    // Whole steps, and any: those round a product and a sum in f64, or both at once.
    for (const bool whole : {true, false}) {
      const double start = whole ? 1 : c.uniform(-9, 9), step = whole ? 2 : c.uniform(-1, 1);
      Operand& y = c.output(dtype, 1000);
      c.compute([&](const Kernels& k, Side side, Exec& exec) {
        k.arange({.out = y.at(side), .start = start, .step = step, .count = 1000, .dtype = dtype},
                 exec);
      });
      for (std::int64_t i = 0; i < y.size(); ++i) {
        using B = Bounded<double>;
        const B value = B::given(start) + B::given(step) * B(static_cast<double>(i));
        if (whole || !is_floating(dtype))
          exactly(c, y, i, cast_to(dtype, value.v));
        else
          near(c, y, i, value);
      }
      c.next();
    }
  }
}

TESSERA_CASE("elementwise", "where") {
  for (const DType dtype : kHeld)
    for (const std::int32_t n : {1, 64, 61}) {
      Operand &condition = c.input(boolean, 4 * n), &a = c.input(dtype, 4 * n),
              &b = c.input(dtype, n), &y = c.output(dtype, 4 * n), &z = c.output(dtype, 4 * n);
      c.compute([&](const Kernels& k, Side side, Exec& exec) {
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
        // One condition for each row, a transposed, b one number.
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
      for (std::int64_t i = 0; i < y.size(); ++i) {
        const std::int64_t row = i / n, column = i % n;
        c.near(y, i, condition.get(i) != 0 ? a.get(i) : b.get(column), 0);
        c.near(z, i, condition.get(row) != 0 ? a.get(row + 4 * column) : b.get(0), 0);
      }
      c.next();
    }
}

}  // namespace kernel_test
