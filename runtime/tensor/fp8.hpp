// Tensors as 8-bit floats with scales, and their products: launches of kernels/quantize.hpp and
// gemm_fp8.hpp.
#pragma once

#include "kernels/gemm_fp8.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::detail {

// A matrix [rows, cols].
struct Fp8Matrix {
  Tensor codes, scales;
  kernels::Scaling scaling = kernels::Scaling::tensor;
};

enum class Fp8Form : std::uint8_t { plain, transposed, both };

// x [rows, cols] and its transpose, as far as they are asked for.
struct Fp8Forms {
  Fp8Matrix plain, transposed;
};
Fp8Forms quantize(const Tensor& x, DType to, kernels::Scaling scaling, Fp8Form form);

// What a norm would have written, by the statistics of its rows, and `most` with Scaling::tensor
// alone. x [..., cols] is what it normalises; weight, bias and mean may be undefined.
struct NormOf {
  Tensor x, weight, bias, mean, rstd, most;
};
// What SwiGLU would have written, from [..., cols] each.
struct SwigluOf {
  Tensor gate, up;
};
// In e4m3, and not by blocks.
Fp8Forms quantize(const NormOf& norm, kernels::Scaling scaling, Fp8Form form);
Fp8Forms quantize(const SwigluOf& swiglu, kernels::Scaling scaling, Fp8Form form);

// out [m, n] = alpha a b^T + beta out + bias, of a [m, k] and b [n, k]; out is a matrix for which
// can_hold_product.
void multiply_fp8(const Tensor& out, const Fp8Matrix& a, const Fp8Matrix& b, double alpha,
                  double beta, const Tensor& bias, bool fast);
// Contiguous, and aligned to what the kernel wants.
bool can_hold_product(const Tensor& out);

}  // namespace tessera::detail
