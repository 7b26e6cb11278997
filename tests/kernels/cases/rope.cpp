// Rotary embedding and its tables.
#include <cmath>

#include "tests/kernels/case.hpp"

using namespace kernel_test;

namespace {

// x [B, T, H, D] with `gap` elements behind each head, `others` behind them that are not turned,
// and `shift` before the first. y is the same, or [B, H, T, D] without gaps.
struct Sizes {
  std::int64_t batch, length, heads, dim;
  std::int64_t gap = 0, shift = 0;
  bool in_place = false, transposed = false;
  std::int64_t others = 0;
};

void check(Case& c, DType dtype, const Sizes& s, bool inverse) {
  constexpr std::int32_t position = 3;
  const std::int64_t h = s.dim + s.gap, t = h * (s.heads + s.others), b = t * s.length,
                     half = s.dim / 2;
  const std::int64_t shift = s.shift * static_cast<std::int64_t>(size_bytes(dtype));
  const std::int64_t yb = s.transposed ? s.heads * s.length * s.dim : b,
                     yt = s.transposed ? s.dim : t, yh = s.transposed ? s.length * s.dim : h;
  Operand& cos = c.input(f32, (s.length + position) * half, -1, 1);
  Operand& sin = c.input(f32, (s.length + position) * half, -1, 1);
  Operand& x = s.in_place ? c.updated(dtype, b * s.batch, -2, 2, shift)
                          : c.input(dtype, b * s.batch, -2, 2, shift);
  Operand& y = s.in_place ? x : c.output(dtype, yb * s.batch, shift);
  c.compute([&](const Kernels& k, Side side, Exec& exec) {
    k.rope({.y = y.at(side),
            .x = x.at(side),
            .cos = cos.at<float>(side),
            .sin = sin.at<float>(side),
            .x_strides = {b, t, h},
            .y_strides = {yb, yt, yh},
            .position = position,
            .batch = static_cast<std::int32_t>(s.batch),
            .length = static_cast<std::int32_t>(s.length),
            .heads = static_cast<std::uint16_t>(s.heads),
            .head_dim = static_cast<std::uint16_t>(s.dim),
            .dtype = dtype,
            .inverse = inverse},
           exec);
  });
  std::vector<double> expected;  // gaps stay
  for (std::int64_t i = 0; i < y.size(); ++i) expected.push_back(y.get(i));
  for (std::int64_t i = 0; i < s.batch * s.length * s.heads * half; ++i) {
    const std::int64_t d = i % half, head = i / half % s.heads, at = i / half / s.heads % s.length,
                       item = i / half / s.heads / s.length;
    const std::int64_t from = item * b + at * t + head * h + d, row = (at + position) * half + d;
    const auto to = static_cast<std::size_t>(item * yb + at * yt + head * yh + d);
    const double turn = (inverse ? -1 : 1) * sin.get(row);
    expected[to] = x.get(from) * cos.get(row) - x.get(from + half) * turn;
    expected[to + static_cast<std::size_t>(half)] =
        x.get(from + half) * cos.get(row) + x.get(from) * turn;
  }
  // Tables are at most 1 and x at most 2: two products of at most 2 and a sum of at most 4 are off
  // by 2 + 2 + 4 roundings of 1 in the computing type; then one rounding to the dtype.
  const double absolute = 8 * (dtype == f64 ? 0x1p-53 : 0x1p-24) + (dtype == f16 ? 0x1p-25 : 0);
  const double relative = dtype == bf16 || dtype == f16 ? 1.01 * epsilon(dtype) : 0;
  for (std::int64_t i = 0; i < y.size(); ++i) {
    const double value = expected[static_cast<std::size_t>(i)];
    c.near(y, i, value, relative * std::abs(value) + absolute);
  }
  c.next();
}

}  // namespace

TESSERA_CASE("rope", "every dtype, either way, packs and tails, strides, misaligned, in place") {
  for (const DType dtype : {f32, bf16, f16, f64})
    for (const bool inverse : {false, true})
      for (const Sizes& s : {Sizes{2, 5, 3, 64},
                             {1, 7, 2, 6},
                             {1, 1, 1, 2},
                             {1, 3, 40, 32},
                             {2, 3, 2, 16, 16},
                             {2, 3, 2, 16, 1},
                             {1, 3, 2, 16, 0, 1},
                             {1, 3, 2, 16, 0, 0, true},
                             {2, 0, 2, 16},
                             {2, 13, 3, 34, 68, 0, true},
                             {2, 7, 3, 16, 0, 0, true, false, 2},
                             {2, 7, 3, 6, 0, 0, true, false, 1},
                             {2, 13, 3, 34, 68, 0, false, true},
                             {2, 13, 3, 2, 4, 0, false, true},
                             {2, 200, 9, 16, 0, 0, false, true}})
        check(c, dtype, s, inverse);
}

// An angle of at most 700 is off by a few 2^-53 of itself, from pow on either side (2 ulp): 16
// times is allowed; then it is rounded to f32 once.
TESSERA_CASE("rope", "tables") {
  for (const std::int64_t dim : {2, 6, 64})
    for (const std::int64_t positions : {1, 33, 700}) {
      const std::int64_t half = dim / 2;
      Operand &cos = c.output(f32, positions * half), &sin = c.output(f32, positions * half);
      c.compute([&](const Kernels& k, Side side, Exec& exec) {
        k.rope_table({cos.at<float>(side), sin.at<float>(side), positions, dim, 10000}, exec);
      });
      for (std::int64_t i = 0; i < cos.size(); ++i) {
        const double angle =
            static_cast<double>(i / half) *
            std::pow(10000, -2.0 * static_cast<double>(i % half) / static_cast<double>(dim));
        const double near_zero = 700 * 16 * 0x1p-53;
        c.near(cos, i, std::cos(angle), 1.01 * 0x1p-24 * std::abs(std::cos(angle)) + near_zero);
        c.near(sin, i, std::sin(angle), 1.01 * 0x1p-24 * std::abs(std::sin(angle)) + near_zero);
      }
      c.next();
    }
}
