// Matrix products: C[b] = alpha op(A[b]) op(B[b]) + beta C0[b] + bias, row-major.
//
//   op(A) is [m, k]: A is stored [m, k], or [k, m] when trans_a; rows lie `lda` elements apart
//   op(B) is [k, n]: B is stored [k, n], or [n, k] when trans_b; rows lie `ldb` elements apart
//   C     is [m, n], rows `ldc` apart; C0 lies as C does, and is C where `c0` is null
//   bias  is [n] or null, added to every row
//
// x W^T of a linear layer is trans_b; dy W is neither; dy^T x, its weight gradient, is trans_a.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// A, B and bias have `dtype`, floating; C has the same, or f32 when `dtype` is 16-bit (weight
// gradients). 16-bit inputs are multiplied and accumulated in f32 over all of k and rounded once,
// but on a GPU whose library is given beta C0 and a bias: twice, as cuBLASLt 13.1 does on an H100.
// beta == 0 never reads C0; k == 0 gives beta C0 + bias; m, n or batch == 0 does nothing. C
// overlaps nothing. A batch stride of 0 repeats a matrix; matrices of C are apart.
struct GemmArgs {
  void* c;
  const void *a, *b, *bias;
  double alpha, beta;
  std::int64_t a_batch_stride, b_batch_stride, c_batch_stride;
  std::int32_t batch, m, n, k;
  std::int32_t lda, ldb, ldc;
  DType dtype, c_dtype;
  bool trans_a : 1, trans_b : 1;
  bool tf32 : 1 = false;  // f32 operands may be rounded to 11 significant bits first, on a GPU
  const void* c0 = nullptr;
};

// A product with GELU (kernels/elementwise.hpp) or its derivative over it, all of `dtype`:
//
//   forward    aux = op(A) op(B) + bias;  c = gelu(aux)      aux is written, for backward
//   backward   c = (op(A) op(B)) gelu'(aux)                  aux is read, bias is null
//
// Layouts and empty sizes as above. aux is [m, n], rows `ld_aux` apart. The CPU rounds the product
// before it applies the function: the bits of the two kernels that this one stands for. A GPU's
// library may round it before the bias, too.
struct GemmGeluArgs {
  void *c, *aux;
  const void *a, *b, *bias;
  std::int32_t m, n, k;
  std::int32_t lda, ldb, ldc, ld_aux;
  DType dtype;
  bool trans_a, trans_b, backward;
};

}  // namespace tessera::kernels
