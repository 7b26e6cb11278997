// Products, and products of linear layers together with what stands around them.
#pragma once

#include "tessera/tensor/tensor.hpp"

namespace tessera {

// a b, of matrices or stacks of them; leading dimensions broadcast. A vector is a row on the left
// and a column on the right; its dimension of size 1 is dropped.
Tensor matmul(const Tensor& a, const Tensor& b, Caller at = Caller::current());
// a_i b_j: [n], [m] -> [n, m].
Tensor outer(const Tensor& a, const Tensor& b, Caller at = Caller::current());
// x W^T + bias: x [..., in], weight [out, in], bias [out] or undefined -> [..., out].
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              Caller at = Caller::current());
// The same with GELU between two layers. In both passes GELU is then part of a product. On the CPU,
// linear(linear_gelu(x, w1, b1), w2, b2) has the bits of linear(gelu(linear(x, w1, b1)), w2, b2).
struct Activated {
  Tensor before;  // x W^T + bias, which carries the history
  Tensor value;   // its GELU, which carries none
};
Activated linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                      Caller at = Caller::current());
Tensor linear(const Activated& x, const Tensor& weight, const Tensor& bias = {},
              Caller at = Caller::current());
// residual [..., out] + linear(x, weight, bias). It is added within the product, and rounded once
// with it.
Tensor add_linear(const Tensor& residual, const Tensor& x, const Tensor& weight,
                  const Tensor& bias = {}, Caller at = Caller::current());
Tensor add_linear(const Tensor& residual, const Activated& x, const Tensor& weight,
                  const Tensor& bias = {}, Caller at = Caller::current());

}  // namespace tessera
