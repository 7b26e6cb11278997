#include "tests/cuda/case.hpp"

using namespace cuda_test;

namespace {

// x and y [B, T, H, D] with `gap` elements behind each head, and `shift` before the first.
struct Sizes {
  std::int64_t batch, length, heads, dim;
  std::int64_t gap = 0, shift = 0;
  bool in_place = false;
};

// Tables are at most 1 and x at most 2: products of at most 2, each side's two products and its sum
// are off by 2 u, 2 u and 4 u (u: a rounding of the computing type) and 1.5 times that is allowed;
// with 16 bits two neighbouring roundings beside that, 2 epsilon.
void check(Case& c, DType dtype, const Sizes& s, bool inverse) {
  constexpr std::int32_t position = 3;
  const std::int64_t h = s.dim + s.gap, t = h * s.heads, b = t * s.length, half = s.dim / 2;
  const std::int64_t item = static_cast<std::int64_t>(size_bytes(dtype));
  Operand& cos = c.input(f32, (s.length + position) * half, -1, 1);
  Operand& sin = c.input(f32, (s.length + position) * half, -1, 1);
  Operand& x = s.in_place ? c.updated(dtype, b * s.batch, -2, 2, s.shift * item)
                          : c.input(dtype, b * s.batch, -2, 2, s.shift * item);
  Operand& y = s.in_place ? x : c.output(dtype, b * s.batch, s.shift * item);
  c.run([&](const Kernels& k, Side side, Exec& exec) {
    k.rope({.y = y.at(side),
            .x = x.at(side),
            .cos = cos.at<float>(side),
            .sin = sin.at<float>(side),
            .x_strides = {b, t, h},
            .y_strides = {b, t, h},
            .position = position,
            .batch = static_cast<std::int32_t>(s.batch),
            .length = static_cast<std::int32_t>(s.length),
            .heads = static_cast<std::uint16_t>(s.heads),
            .head_dim = static_cast<std::uint16_t>(s.dim),
            .dtype = dtype,
            .inverse = inverse},
           exec);
  });
  const double u = dtype == f64 ? 0x1p-53 : 0x1p-24;
  c.close(y, dtype == bf16 || dtype == f16 ? 2 * epsilon(dtype) : 0, 24 * u);
}

}  // namespace

TESSERA_CASE("rope", "every dtype, either way, packs and tails, strides, misaligned, in place") {
  for (const DType dtype : {f32, bf16, f16, f64})
    for (const bool inverse : {false, true}) {
      check(c, dtype, {2, 5, 3, 64}, inverse);
      check(c, dtype, {1, 7, 2, 6}, inverse);
      check(c, dtype, {1, 1, 1, 2}, inverse);
      check(c, dtype, {1, 3, 40, 32}, inverse);
      check(c, dtype, {2, 3, 2, 16, 16}, inverse);
      check(c, dtype, {2, 3, 2, 16, 1}, inverse);
      check(c, dtype, {1, 3, 2, 16, 0, 1}, inverse);
      check(c, dtype, {1, 3, 2, 16, 0, 0, true}, inverse);
      check(c, dtype, {2, 0, 2, 16}, inverse);
    }
}

// An angle of at most 700 is off by a few 2^-53 of itself, from pow on either side (2 ulp): 16
// times is allowed; then both round to f32, maybe to neighbours.
TESSERA_CASE("rope", "tables") {
  for (const std::int64_t dim : {2, 6, 64})
    for (const std::int64_t positions : {1, 33, 700}) {
      Operand& cos = c.output(f32, positions * dim / 2);
      Operand& sin = c.output(f32, positions * dim / 2);
      c.run([&](const Kernels& k, Side side, Exec& exec) {
        k.rope_table({cos.at<float>(side), sin.at<float>(side), positions, dim, 10000}, exec);
      });
      c.close(cos, 0x1p-23, 700 * 16 * 0x1p-53);
      c.close(sin, 0x1p-23, 700 * 16 * 0x1p-53);
    }
}
