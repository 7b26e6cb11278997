// Differentiable operations, with which models are written. Shapes broadcast by NumPy's rule. Both
// operands of a binary operation have one dtype. Every operation here is checked against finite
// differences in f64. include/tessera/tensor/README.md has them beside PyTorch's names.
//
// autograd/custom_op.hpp adds one from outside.
#pragma once

#include <functional>
#include <optional>

#include "tessera/autograd/attention.hpp"
#include "tessera/autograd/composed_losses.hpp"
#include "tessera/autograd/einsum.hpp"
#include "tessera/autograd/elementwise.hpp"
#include "tessera/autograd/fp8.hpp"
#include "tessera/autograd/indexing.hpp"
#include "tessera/autograd/input_form.hpp"
#include "tessera/autograd/losses.hpp"
#include "tessera/autograd/node.hpp"
#include "tessera/autograd/products.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/autograd/reductions.hpp"
#include "tessera/autograd/shapes.hpp"
#include "tessera/tensor/make.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

// --- hooks ---
// x itself. In backward its gradient is first given to f, whose result goes on in its place. An
// undefined result leaves the gradient as it is. PyTorch: Tensor.register_hook.
Tensor on_gradient(const Tensor& x, std::function<Tensor(const Tensor& gradient)> f);

// --- layers' functions ---
// softmax and its logarithm, over one dimension; [] is one element along dimension 0. A slice of
// -inf alone gives NaN. 16-bit floats compute in f32.
Tensor softmax(const Tensor& x, int dim = -1, Caller at = Caller::current());
Tensor log_softmax(const Tensor& x, int dim = -1, Caller at = Caller::current());
// Rows of weight [V, C] by ids [...] -> [..., C].
Tensor embedding(const Tensor& weight, const Tensor& ids, Caller at = Caller::current());
// x weight / sqrt(mean(x^2) + eps) over the last dimension; weight [C], or {} for none.
// `form`, here and in the three below: how the result is written for its readers; see
// autograd/input_form.hpp.
// Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, InputForm form = {},
                Caller at = Caller::current());
// (x - mean) weight / sqrt(var + eps) + bias over the last dimension; weight and bias [C], or {}
// for none.
// Source: Ba, Kiros and Hinton, "Layer normalization", 2016.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                  InputForm form = {}, Caller at = Caller::current());
// x + residual and its norm, in one pass over both, with the bits of two passes. A residual that
// the caller moves in is overwritten by the sum.
struct SumAndNorm {
  Tensor sum, norm;
};
SumAndNorm add_rms_norm(const Tensor& x, Tensor residual, const Tensor& weight, double eps,
                        InputForm form = {}, Caller at = Caller::current());
SumAndNorm add_layer_norm(const Tensor& x, Tensor residual, const Tensor& weight,
                          const Tensor& bias, double eps, InputForm form = {},
                          Caller at = Caller::current());
// Rotates the halves of each head of x [B, T, H, D], D even, by the angles of tables [T_max, D/2].
// Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.
struct RopeTables {
  Tensor cos, sin;  // f32 [T_max, D/2]
  static RopeTables make(std::int64_t positions, std::int64_t head_dim, double theta,
                         const Device& device);
};
Tensor rope(const Tensor& x, const RopeTables& tables, Caller at = Caller::current());
// Rotates the first `heads` heads only, as those of queries and keys in one projection. An x that
// the caller moves in is overwritten, and so is the gradient if nobody else sees it.
Tensor rope(Tensor x, const RopeTables& tables, std::int64_t heads, Caller at = Caller::current());
// Keeps each element with probability 1 - p, scaled by 1 / (1 - p), and sets the others to 0. 0 <=
// p <= 1, where 1 keeps none. The mask depends on (key, offset + index / 4, index mod 4) only.
Tensor dropout(const Tensor& x, double p, autograd::DropoutKey key, std::int64_t offset,
               Caller at = Caller::current());

}  // namespace tessera
