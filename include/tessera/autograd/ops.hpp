// Differentiable operations: what models are written with. Shapes broadcast by NumPy's rule; both
// operands of a binary operation have one dtype. Every operation here is checked against finite
// differences in f64. include/tessera/tensor/README.md has them beside PyTorch's names.
//
// To add one from outside: autograd/custom_op.hpp.
#pragma once

#include <functional>
#include <optional>
#include <string_view>

#include "tessera/autograd/attention.hpp"
#include "tessera/autograd/elementwise.hpp"
#include "tessera/autograd/fp8.hpp"
#include "tessera/autograd/indexing.hpp"
#include "tessera/autograd/losses.hpp"
#include "tessera/autograd/node.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/autograd/reductions.hpp"
#include "tessera/autograd/shapes.hpp"
#include "tessera/tensor/make.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

// --- hooks ---
// x itself; in backward its gradient is first given to f, whose result (undefined: the gradient
// unchanged) goes on. PyTorch: Tensor.register_hook.
Tensor on_gradient(const Tensor& x, std::function<Tensor(const Tensor& gradient)> f);

// --- products ---
// Matrices, or stacks of them; leading dimensions broadcast. A vector is a row on the left, a
// column on the right, and its dimension of size 1 is dropped.
Tensor matmul(const Tensor& a, const Tensor& b, Caller at = Caller::current());
// [n], [m] -> [n, m].
Tensor outer(const Tensor& a, const Tensor& b, Caller at = Caller::current());
// Sums of products by Einstein's rule, as "bqd,bkd->bqk", "..." for leading dimensions of both.
// Without "->" the letters that stand once come out in alphabetic order.
Tensor einsum(std::string_view formula, const Tensor& a, const Tensor& b,
              Caller at = Caller::current());
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

// --- layers' functions ---
// Over one dimension; [] is one element along dimension 0. A slice of -inf alone gives NaN. 16-bit
// floats compute in f32.
Tensor softmax(const Tensor& x, int dim = -1, Caller at = Caller::current());
Tensor log_softmax(const Tensor& x, int dim = -1, Caller at = Caller::current());
// Rows of weight [V, C] by ids [...] -> [..., C].
Tensor embedding(const Tensor& weight, const Tensor& ids, Caller at = Caller::current());
// x weight / sqrt(mean(x^2) + eps) over the last dimension; weight [C].
// `rounded`, here and of the three below: in 8 bits, for linear_fp8 alone, see autograd/fp8.hpp.
// Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps,
                std::optional<Fp8Recipe> rounded = {}, Caller at = Caller::current());
// (x - mean) weight / sqrt(var + eps) + bias over the last dimension; weight and bias [C].
// Source: Ba, Kiros and Hinton, "Layer normalization", 2016.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                  std::optional<Fp8Recipe> rounded = {}, Caller at = Caller::current());
// x + residual and its norm, in one pass over both, with the bits of two. A residual that the
// caller gives away is overwritten by the sum.
struct SumAndNorm {
  Tensor sum, norm;
};
SumAndNorm add_rms_norm(const Tensor& x, Tensor residual, const Tensor& weight, double eps,
                        std::optional<Fp8Recipe> rounded = {}, Caller at = Caller::current());
SumAndNorm add_layer_norm(const Tensor& x, Tensor residual, const Tensor& weight,
                          const Tensor& bias, double eps, std::optional<Fp8Recipe> rounded = {},
                          Caller at = Caller::current());
// Rotates the halves of each head of x [B, T, H, D], D even, by the angles of tables [T_max, D/2].
// Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.
struct RopeTables {
  Tensor cos, sin;  // f32 [T_max, D/2]
  static RopeTables make(std::int64_t positions, std::int64_t head_dim, double theta,
                         const Device& device);
};
Tensor rope(const Tensor& x, const RopeTables& tables, Caller at = Caller::current());
// The same of the first `heads` heads alone, as those of queries and keys in one projection. What
// the caller gives away is overwritten, and so is the gradient where nobody else sees it.
Tensor rope(Tensor x, const RopeTables& tables, std::int64_t heads, Caller at = Caller::current());
// Each element kept with probability 1 - p and scaled by 1 / (1 - p), 0 <= p <= 1, where 1 keeps
// none; the mask depends on (key, offset + index / 4, index mod 4) only.
Tensor dropout(const Tensor& x, double p, autograd::DropoutKey key, std::int64_t offset,
               Caller at = Caller::current());

}  // namespace tessera
