// Products, and linear layers' with what stands around them.
#pragma once

#include "tessera/tensor/tensor.hpp"

namespace tessera {

// Matrices, or stacks of them; leading dimensions broadcast. A vector is a row on the left, a
// column on the right, and its dimension of size 1 is dropped.
Tensor matmul(const Tensor& a, const Tensor& b, Caller at = Caller::current());
// [n], [m] -> [n, m].
Tensor outer(const Tensor& a, const Tensor& b, Caller at = Caller::current());
// x W^T + bias: x [..., in], weight [out, in], bias [out] or undefined -> [..., out].
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              Caller at = Caller::current());
// The same with GELU between two layers: linear(linear_gelu(x, w1, b1), w2, b2) has the bits of
// linear(gelu(linear(x, w1, b1)), w2, b2) on the CPU, and in both passes GELU belongs to a product.
struct Activated {
  Tensor before;  // x W^T + bias, which carries the history
  Tensor value;   // its GELU, which carries none
};
Activated linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                      Caller at = Caller::current());
Tensor linear(const Activated& x, const Tensor& weight, const Tensor& bias = {},
              Caller at = Caller::current());
// residual [..., out] + linear(x, weight, bias), added within the product and rounded once with it.
Tensor add_linear(const Tensor& residual, const Tensor& x, const Tensor& weight,
                  const Tensor& bias = {}, Caller at = Caller::current());
Tensor add_linear(const Tensor& residual, const Activated& x, const Tensor& weight,
                  const Tensor& bias = {}, Caller at = Caller::current());

}  // namespace tessera
