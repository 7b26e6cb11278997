// Products of 8-bit floats with scales, of every pair of formats and scalings.
#include <array>
#include <cmath>
#include <vector>

#include "kernels/gemm_fp8.hpp"
#include "tests/kernels/bounded.hpp"

namespace kernel_test {
namespace {

struct Fp8Product {
  std::int32_t m, n, k;
  DType a_dtype = e4m3, b_dtype = e4m3, c_dtype = bf16;
  Scaling a_scaling = Scaling::tensor, b_scaling = Scaling::tensor;
  bool bias = false;
  double alpha = 1, beta = 0;
  bool fast = false;
};

// Codes [rows, k] and the numbers that they stand for.
struct Fp8Factor {
  Operand &codes, &scales;
  std::vector<double> values;

  Fp8Factor(Case& c, DType dtype, Scaling scaling, std::int64_t rows, std::int64_t k)
      : codes(c.input(dtype, rows * k, -400, 400)),
        scales(c.input(f32, scale_count(scaling, rows, k))) {
    for (std::int64_t i = 0; i < scales.size(); ++i)
      scales.set(i, std::exp2(static_cast<double>(c.integer(-12, -6))));
    const std::int64_t stride = scale_stride(scaling, rows, k);
    for (std::int64_t i = 0; i < codes.size(); ++i)
      values.push_back(codes.get(i) * scales.get(scale_index(scaling, stride, i / k, i % k)));
  }
};

void check_fp8(Case& c, const Fp8Product& p) {
  const Fp8Factor a(c, p.a_dtype, p.a_scaling, p.m, p.k), b(c, p.b_dtype, p.b_scaling, p.n, p.k);
  Operand& bias = c.input(p.c_dtype, p.n);
  Operand& out = p.beta == 0 ? c.output(p.c_dtype, std::int64_t{p.m} * p.n)
                             : c.updated(p.c_dtype, std::int64_t{p.m} * p.n);
  c.compute([&](const Kernels& kernels, Side side, Exec& exec) {
    kernels.gemm_fp8({.c = out.at(side),
                      .a = a.codes.at(side),
                      .b = b.codes.at(side),
                      .bias = p.bias ? bias.at(side) : nullptr,
                      .a_scales = a.scales.at<float>(side),
                      .b_scales = b.scales.at<float>(side),
                      .alpha = p.alpha,
                      .beta = p.beta,
                      .m = p.m,
                      .n = p.n,
                      .k = p.k,
                      .a_dtype = p.a_dtype,
                      .b_dtype = p.b_dtype,
                      .c_dtype = p.c_dtype,
                      .a_scaling = p.a_scaling,
                      .b_scaling = p.b_scaling,
                      .fast = p.fast},
                     exec);
  });
  // As of other products (cases/gemm.cpp), k + 4 roundings of the sum of magnitudes. Tensor cores
  // that keep 14 bits of a `fast` sum drop 2^-13 of it with each 32 terms that they add.
  const double roundings =
      (p.k + 4) * epsilon(f32) + (p.fast && c.target().driver ? (p.k / 32 + 1) * 0x1p-13 : 0);
  for (std::int64_t i = 0; i < out.size(); ++i) {
    const auto row = static_cast<std::size_t>(i / p.n * p.k),
               column = static_cast<std::size_t>(i % p.n * p.k);
    double sum = 0, magnitude = 0;
    for (std::size_t l = 0; l < static_cast<std::size_t>(p.k); ++l) {
      const double term = a.values[row + l] * b.values[column + l];
      sum += term;
      magnitude += std::abs(term);
    }
    const double old = p.beta == 0 ? 0 : p.beta * out.get(i),
                 added = p.bias ? bias.get(i % p.n) : 0;
    auto value = Bounded<float>::given(p.alpha * sum + old + added);
    value.error = roundings * (std::abs(p.alpha) * magnitude + std::abs(old) + std::abs(added));
    double bound = stored_error(p.c_dtype, value);
    // The library rounds what it adds to beta C first, the product or the bias.
    if (p.bias && p.beta != 0 && c.target().driver)
      bound += bound + epsilon(p.c_dtype) * std::abs(added);
    c.near(out, i, value.v, bound);
  }
  c.next();
}

}  // namespace

TESSERA_CASE("gemm_fp8", "a linear layer: x W^T + bias, dy W, dy^T x into f32, twice") {
  for (const DType dtype : {bf16, f16, f32}) {
    check_fp8(c, {.m = 37, .n = 48, .k = 160, .c_dtype = dtype, .bias = true, .fast = true});
    check_fp8(c, {.m = 128, .n = 272, .k = 48, .a_dtype = e5m2, .c_dtype = dtype});
  }
  for (const double beta : {0.0, 1.0})
    check_fp8(c, {.m = 112,
                  .n = 64,
                  .k = 400,
                  .a_dtype = e5m2,
                  .c_dtype = f32,
                  .alpha = 0.25,
                  .beta = beta});
}

TESSERA_CASE("gemm_fp8", "scales by rows and by blocks, in either operand") {
  for (const auto& [a, b] : {std::array{Scaling::rows, Scaling::rows},
                             {Scaling::rows, Scaling::blocks},
                             {Scaling::blocks, Scaling::rows}})
    for (const std::int32_t k : {16, 128, 656})
      check_fp8(c, {.m = 144,
                    .n = 160,
                    .k = k,
                    .c_dtype = k == 128 ? f32 : bf16,
                    .a_scaling = a,
                    .b_scaling = b,
                    .alpha = 0.5,
                    .beta = k == 128 ? 1.0 : 0.0});
}

TESSERA_CASE("gemm_fp8", "either operand in e5m2, more rows and columns than a block has") {
  check_fp8(c, {.m = 201, .n = 304, .k = 32, .b_dtype = e5m2, .bias = true, .beta = 1});
}

TESSERA_CASE("gemm_fp8", "sums of nothing, and products without an element") {
  for (const bool bias : {false, true})
    for (const double beta : {0.0, 0.5})
      check_fp8(c, {.m = 5, .n = 16, .k = 0, .bias = bias, .beta = beta});
  Operand& out = c.updated(bf16, 16);
  c.compute([&](const Kernels& kernels, Side side, Exec& exec) {
    kernels.gemm_fp8({.c = out.at(side),
                      .a = out.at(side),
                      .b = out.at(side),
                      .bias = nullptr,
                      .a_scales = nullptr,
                      .b_scales = nullptr,
                      .alpha = 1,
                      .beta = 0,
                      .m = 0,
                      .n = 16,
                      .k = 16,
                      .a_dtype = e4m3,
                      .b_dtype = e4m3,
                      .c_dtype = bf16,
                      .a_scaling = Scaling::tensor,
                      .b_scaling = Scaling::tensor,
                      .fast = false},
                     exec);
  });
  for (std::int64_t i = 0; i < out.size(); ++i) c.near(out, i, out.get(i), 0);
}

}  // namespace kernel_test
