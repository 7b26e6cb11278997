// Attention over whole sequences: the fused causal function of the models here, and PyTorch's
// general one.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/autograd/random.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

// Causal softmax(q k^T / sqrt(D)) v:
// q [B, T, H, D], k and v [B, T, Hkv, D], Hkv divides H, D at most 256 -> [B, T, H, D].
Tensor causal_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                        Caller at = Caller::current());
// The same, read from one projection, and its gradient is written to one tensor: qkv [B, T, H + 2
// Hkv, D] has the heads of queries, keys and values side by side -> [B, T, H, D].
Tensor causal_attention(const Tensor& qkv, std::int64_t kv_heads, Caller at = Caller::current());

// A key takes part in a query's sum if neither mask nor is_causal excludes it. (PyTorch's attn_mask
// is `mask` if boolean and `bias` if floating, and can't be combined with is_causal.)
struct ScaledDotProductOptions {
  Tensor mask{};           // boolean, true where a key takes part; broadcasts to [B, H, L, S]
  Tensor bias{};           // added to the scaled scores; broadcasts to [B, H, L, S]
  bool is_causal = false;  // query l attends to keys 0 to l, whatever L and S are
  std::optional<double> scale{};  // of q k^T; unset: 1 / sqrt(E)
  double dropout = 0;             // p of the softmax's elements, as of the function `dropout`
  autograd::DropoutKey dropout_key{0};
  std::optional<std::int64_t> dropout_offset{};  // autograd::dropout_offset of the weights
};

// softmax(scale q k^T + bias) v with gradients for q, k, v and bias:
// q [B, H, L, E], k [B, Hkv, S, E], v [B, Hkv, S, Ev], of one floating dtype -> [B, H, L, Ev].
// Hkv divides H: query head h reads head h / (H / Hkv) (PyTorch's enable_gqa). A query for which no
// key takes part gives zeros, and its gradients are zeros, as in PyTorch since 2.5.
//
// The fused kernel computes it, without a buffer of L x S, if L = S, E = Ev <= 256, and there is
// neither mask, bias nor dropout. It reads transposed views of [B, L, H, E], as projections give,
// in place. It takes the scale as f32, in f64, too. Anything else makes the scores, in f32 (f64 for
// f64). One tensor of B H L S elements is kept for backward, and at most two live beside it at a
// time. Throws: ContractError for shapes and dtypes that do not fit.
Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const ScaledDotProductOptions& options = {},
                                    Caller at = Caller::current());

}  // namespace tessera
