// Differentiable operations: what models are written with. Shapes broadcast by NumPy's rule; both
// operands of a binary operation have one dtype. Every operation here is checked against finite
// differences in f64.
//
// To add one from outside: compute with raw:: operations or a kernel of your own, then
// autograd::record its backward; the lesson tests/tour/050_your_own_op.cpp does it.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "tessera/autograd/node.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

// --- arithmetic ---
Tensor add(const Tensor& a, const Tensor& b);
Tensor sub(const Tensor& a, const Tensor& b);
Tensor mul(const Tensor& a, const Tensor& b);
Tensor div(const Tensor& a, const Tensor& b);
Tensor add(const Tensor& a, double b);
Tensor mul(const Tensor& a, double b);
Tensor neg(const Tensor& x);
inline Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
inline Tensor operator-(const Tensor& a, const Tensor& b) { return sub(a, b); }
inline Tensor operator*(const Tensor& a, const Tensor& b) { return mul(a, b); }
inline Tensor operator/(const Tensor& a, const Tensor& b) { return div(a, b); }
inline Tensor operator+(const Tensor& a, double b) { return add(a, b); }
inline Tensor operator-(const Tensor& a, double b) { return add(a, -b); }
inline Tensor operator*(const Tensor& a, double b) { return mul(a, b); }
inline Tensor operator*(double a, const Tensor& b) { return mul(b, a); }
inline Tensor operator/(const Tensor& a, double b) { return mul(a, 1 / b); }
inline Tensor operator-(const Tensor& x) { return neg(x); }

// Comparisons give boolean tensors without history.
inline Tensor operator==(const Tensor& a, const Tensor& b) {
  return raw::binary(raw::Binary::eq, a, b);
}
inline Tensor operator!=(const Tensor& a, const Tensor& b) {
  return raw::binary(raw::Binary::ne, a, b);
}
inline Tensor operator<(const Tensor& a, const Tensor& b) {
  return raw::binary(raw::Binary::lt, a, b);
}
inline Tensor operator<=(const Tensor& a, const Tensor& b) {
  return raw::binary(raw::Binary::le, a, b);
}
inline Tensor operator>(const Tensor& a, const Tensor& b) {
  return raw::binary(raw::Binary::gt, a, b);
}
inline Tensor operator>=(const Tensor& a, const Tensor& b) {
  return raw::binary(raw::Binary::ge, a, b);
}
// condition ? a : b.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);

// --- elementwise functions ---
Tensor exp(const Tensor& x);
Tensor log(const Tensor& x);
Tensor sqrt(const Tensor& x);
Tensor tanh(const Tensor& x);
Tensor relu(const Tensor& x);  // derivative 0 at 0
Tensor gelu(const Tensor& x);  // 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
Tensor silu(const Tensor& x);  // x sigmoid(x)
Tensor swiglu(const Tensor& gate, const Tensor& up);  // silu(gate) * up
Tensor cast(const Tensor& x, DType dtype);  // between floating dtypes; the gradient is cast back

// --- hooks ---
// x itself; in backward its gradient is first given to f, whose result (undefined: the gradient
// unchanged) goes on. PyTorch: Tensor.register_hook.
Tensor on_gradient(const Tensor& x, std::function<Tensor(const Tensor& gradient)> f);

// --- reductions ---
// Without a dimension to shape []; along one it is dropped, or kept as size 1.
Tensor sum(const Tensor& x);
Tensor mean(const Tensor& x);
Tensor norm(const Tensor& x);  // sqrt of the sum of squares
Tensor sum(const Tensor& x, int dim, raw::KeepDim keep = raw::KeepDim::no);
Tensor mean(const Tensor& x, int dim, raw::KeepDim keep = raw::KeepDim::no);
Tensor max(const Tensor& x, int dim);  // the gradient goes to the first of equal maxima
inline Tensor argmax(const Tensor& x, int dim) {
  return raw::reduce(raw::Reduction::argmax, x, dim);
}

// --- shapes ---
Tensor reshape(const Tensor& x, const Shape& shape);
Tensor transpose(const Tensor& x, int dim0, int dim1);
Tensor permute(const Tensor& x, std::initializer_list<int> order);
Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end);
Tensor expand(const Tensor& x, const Shape& shape);
Tensor cat(std::span<const Tensor> parts, int dim);
Tensor stack(std::span<const Tensor> parts, int dim);
// Pieces of `size` along dim; the last may be shorter.
std::vector<Tensor> split(const Tensor& x, std::int64_t size, int dim);

// --- indices (i32 or i64) ---
// Rows `index` [count] of dim; x at `index` along dim, whose other sizes are x's; x with `source`
// added there. An index out of range reads as NaN and adds nothing.
Tensor index_select(const Tensor& x, int dim, const Tensor& index);
Tensor gather(const Tensor& x, int dim, const Tensor& index);
Tensor scatter_add(const Tensor& x, int dim, const Tensor& index, const Tensor& source);

// --- products ---
// Matrices, or stacks of them; leading dimensions broadcast.
Tensor matmul(const Tensor& a, const Tensor& b);
// x W^T + bias: x [..., in], weight [out, in], bias [out] or undefined -> [..., out].
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});
// The same with GELU between two layers: linear(linear_gelu(x, w1, b1), w2, b2) has the bits of
// linear(gelu(linear(x, w1, b1)), w2, b2) on the CPU, and in both passes GELU belongs to a product.
struct Activated {
  Tensor before;  // x W^T + bias, which carries the history
  Tensor value;   // its GELU, which carries none
};
Activated linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias = {});
Tensor linear(const Activated& x, const Tensor& weight, const Tensor& bias = {});

// --- layers' functions ---
Tensor softmax(const Tensor& x);  // over the last dimension
// Rows of weight [V, C] by ids [...] -> [..., C].
Tensor embedding(const Tensor& weight, const Tensor& ids);
// x weight / sqrt(mean(x^2) + eps) over the last dimension; weight [C].
// Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
// (x - mean) weight / sqrt(var + eps) + bias over the last dimension; weight and bias [C].
// Source: Ba, Kiros and Hinton, "Layer normalization", 2016.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps);
// x + residual and its norm, in one pass over both, with the bits of two. A residual that the
// caller gives away is overwritten by the sum.
struct SumAndNorm {
  Tensor sum, norm;
};
SumAndNorm add_rms_norm(const Tensor& x, Tensor residual, const Tensor& weight, double eps);
SumAndNorm add_layer_norm(const Tensor& x, Tensor residual, const Tensor& weight,
                          const Tensor& bias, double eps);
// Rotates the halves of each head of x [B, T, H, D], D even, by the angles of tables [T_max, D/2].
// Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.
struct RopeTables {
  Tensor cos, sin;  // f32 [T_max, D/2]
  static RopeTables make(std::int64_t positions, std::int64_t head_dim, double theta,
                         const Device& device);
};
Tensor rope(const Tensor& x, const RopeTables& tables);
// Causal softmax(q k^T / sqrt(D)) v:
// q [B, T, H, D], k and v [B, T, Hkv, D], Hkv divides H -> [B, T, H, D].
Tensor causal_attention(const Tensor& q, const Tensor& k, const Tensor& v);
// The same, read from one projection and its gradient written to one tensor: qkv
// [B, T, H + 2 Hkv, D] has the heads of queries, keys and values side by side -> [B, T, H, D].
Tensor causal_attention(const Tensor& qkv, std::int64_t kv_heads);
// Each element kept with probability 1 - p and scaled by 1 / (1 - p), 0 <= p <= 1, where 1 keeps
// none; the mask depends on (key, offset + index / 4, index mod 4) only.
Tensor dropout(const Tensor& x, double p, std::uint64_t key, std::int64_t offset);
// The mean over rows of -log softmax(logits)[target], in nats: logits [N, V], targets [N] i32 or
// i64 -> f32 [] (f64 for f64). A target outside [0, V) makes it NaN.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets);
// cross_entropy(linear(x, weight, bias), targets) of x [..., in] and targets [N], N rows of x,
// without all logits: they are made for chunk_rows at a time, and once more in backward. Its values
// are the same but for the order in which the gradients of weight and bias are summed;
// where these are written in 16 bits, each chunk rounds.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& bias,
                            const Tensor& targets, std::int64_t chunk_rows);

}  // namespace tessera
