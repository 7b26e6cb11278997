// Strided and broadcast operands, of any shape, on the CPU.
#include "tests/kernels/support.hpp"

using namespace kernel_test;

namespace {

// A random view of at most `ndim` dimensions into an array large enough for it: permuted, with
// gaps, some broadcast.
struct RandomView {
  std::vector<std::int32_t> strides;
  std::int64_t extent = 1;

  RandomView(kernel_test::Random& random, const std::vector<std::int32_t>& shape,
             bool may_broadcast)
      : strides(shape.size()) {
    std::vector<std::size_t> order(shape.size());
    for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
    if (random.integer(0, 1) == 1)
      std::shuffle(order.begin(), order.end(), random.engine);
    else
      std::reverse(order.begin(), order.end());  // innermost dimension first: a unit stride
    for (const std::size_t d : order) {
      if (may_broadcast && random.integer(0, 3) == 0) continue;
      strides[d] = static_cast<std::int32_t>(extent);
      extent *= shape[d] + random.integer(0, 1);
    }
    extent += 1;
  }
};

std::vector<std::int32_t> random_shape(kernel_test::Random& random, int ndim) {
  std::vector<std::int32_t> shape;
  for (int d = 0; d < ndim; ++d)
    shape.push_back(static_cast<std::int32_t>(
        random.integer(1, d + 1 == ndim && random.integer(0, 1) ? 200 : 7)));
  return shape;
}

std::int64_t product(const std::vector<std::int32_t>& shape) {
  std::int64_t n = 1;
  for (const auto s : shape) n *= s;
  return n;
}

// Offset of element `linear` of `shape` under `strides`.
std::int64_t offset(const std::vector<std::int32_t>& shape,
                    const std::vector<std::int32_t>& strides, std::int64_t linear) {
  std::int64_t at = 0;
  for (std::size_t d = shape.size(); d-- > 0;) {
    at += linear % shape[d] * strides[d];
    linear /= shape[d];
  }
  return at;
}

template <std::size_t N>
void put(std::int32_t (&to)[N], const std::vector<std::int32_t>& from) {
  std::copy(from.begin(), from.end(), to);
}

}  // namespace

TEST_CASE("unary and copy follow any strides", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (int round = 0; round < 200; ++round) {
    const int ndim = static_cast<int>(random.integer(1, kUnaryDims));
    const auto shape = random_shape(random, ndim);
    const RandomView in_view(random, shape, true), out_view(random, shape, false);
    const DType dtype = kAll[random.integer(0, 6)],
                to = round % 2 ? dtype : kAll[random.integer(0, 6)];
    const UnaryOp op =
        is_floating(dtype) && dtype == to && round % 4 == 1 ? UnaryOp::neg : UnaryOp::copy;
    INFO("round " << round << ", " << dtype << " to " << to);
    const Array in = random.array(dtype, in_view.extent);
    Array out(to, out_view.extent), expected(to, out_view.extent);
    UnaryArgs args{.out = out.data(),
                   .in = in.data(),
                   .count = product(shape),
                   .shape = {},
                   .out_strides = {},
                   .in_strides = {},
                   .op = op,
                   .out_dtype = to,
                   .in_dtype = dtype,
                   .ndim = static_cast<std::uint8_t>(ndim)};
    put(args.shape, shape);
    put(args.in_strides, in_view.strides);
    put(args.out_strides, out_view.strides);
    on_threads([&](Exec& exec) { cpu_kernels().unary(args, exec); }, out);
    for (std::int64_t i = 0; i < args.count; ++i) {
      const double x = in[offset(shape, in_view.strides, i)];
      expected.set(offset(shape, out_view.strides, i), to == DType::boolean ? x != 0
                                                       : op == UnaryOp::neg ? -x
                                                                            : x);
    }
    REQUIRE(out.bytes == expected.bytes);
  }
}

TEST_CASE("binary, scalar and where follow any strides", "[kernels]") {
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (int round = 0; round < 200; ++round) {
    const int ndim = static_cast<int>(random.integer(1, kBinaryDims));
    const auto shape = random_shape(random, ndim);
    const RandomView a_view(random, shape, true), b_view(random, shape, true),
        out_view(random, shape, false), c_view(random, shape, true);
    const DType dtype = kAll[random.integer(0, 5)];
    INFO("round " << round << ", " << dtype);
    const Array a = random.array(dtype, a_view.extent), b = random.array(dtype, b_view.extent),
                c = random.array(DType::boolean, c_view.extent);
    const std::int64_t n = product(shape);
    Array sums(dtype, out_view.extent), less(DType::boolean, out_view.extent), chosen(dtype, n);
    Array expected_sums = sums, expected_less = less, expected_chosen = chosen;
    BinaryArgs add{.out = sums.data(),
                   .a = a.data(),
                   .b = b.data(),
                   .count = n,
                   .shape = {},
                   .out_strides = {},
                   .a_strides = {},
                   .b_strides = {},
                   .op = BinaryOp::add,
                   .dtype = dtype,
                   .ndim = static_cast<std::uint8_t>(ndim)};
    put(add.shape, shape);
    put(add.out_strides, out_view.strides);
    put(add.a_strides, a_view.strides);
    put(add.b_strides, b_view.strides);
    ScalarArgs compare{.out = less.data(),
                       .in = a.data(),
                       .scalar = 0,
                       .count = n,
                       .shape = {},
                       .out_strides = {},
                       .in_strides = {},
                       .op = BinaryOp::lt,
                       .dtype = dtype,
                       .ndim = static_cast<std::uint8_t>(ndim),
                       .scalar_left = false};
    put(compare.shape, shape);
    put(compare.out_strides, out_view.strides);
    put(compare.in_strides, a_view.strides);
    WhereArgs choose{.out = chosen.data(),
                     .condition = c.data(),
                     .a = a.data(),
                     .b = b.data(),
                     .shape = {},
                     .condition_strides = {},
                     .a_strides = {},
                     .b_strides = {},
                     .dtype = dtype,
                     .ndim = static_cast<std::uint8_t>(ndim)};
    put(choose.shape, shape);
    put(choose.condition_strides, c_view.strides);
    put(choose.a_strides, a_view.strides);
    put(choose.b_strides, b_view.strides);
    on_threads(
        [&](Exec& exec) {
          cpu_kernels().binary(add, exec);
          cpu_kernels().scalar(compare, exec);
          cpu_kernels().where(choose, exec);
        },
        sums, less, chosen);
    for (std::int64_t i = 0; i < n; ++i) {
      const double x = a[offset(shape, a_view.strides, i)], y = b[offset(shape, b_view.strides, i)];
      // The sum in f32 for 16-bit floats, as the contract says; one rounding each.
      expected_sums.set(
          offset(shape, out_view.strides, i),
          dtype == DType::f64 || !is_floating(dtype) ? x + y : double(float(x) + float(y)));
      expected_less.set(offset(shape, out_view.strides, i), x < 0);
      expected_chosen.set(i, c[offset(shape, c_view.strides, i)] != 0 ? x : y);
    }
    REQUIRE(sums.bytes == expected_sums.bytes);
    REQUIRE(less.bytes == expected_less.bytes);
    REQUIRE(chosen.bytes == expected_chosen.bytes);
  }
}
