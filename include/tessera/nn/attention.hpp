// Causal self-attention: Llama's, with grouped-query heads and rotary positions, and GPT-2's, with
// one fused projection.
//
//   B batch   T positions   C model width   H query heads   K key-value heads   D head width
//
//   x_BTC ─┬─ q_proj ─ [B, T, H, D] ─ rotate ─┐
//          ├─ k_proj ─ [B, T, K, D] ─ rotate ─┼─ softmax(q k^T / sqrt(D)) v ─ [B, T, H D]
//          └─ v_proj ─ [B, T, K, D] ──────────┘                │
//                                                            o_proj ─ y_BTC
//
// Head h of q reads head h / (H / K) of k and v. With Projections::fused one product and one
// rotation take the place of three and of two:
//
//   x_BTC ── qkv_proj ─ [B, T, H + 2 K, D] ─ rotate the first H + K ─ softmax(q k^T / sqrt(D)) v ─
#pragma once

#include <memory>

#include "tessera/nn/dropout.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/rotary.hpp"

namespace tessera::nn {

struct AttentionOptions {
  std::int64_t dim = 0;
  std::int64_t n_heads = 0;
  std::int64_t n_kv_heads = 0;  // 0: as many as n_heads
  std::int64_t head_dim = 0;    // 0: dim / n_heads
  Projections projections = Projections::separate;
};

// Names: q_proj, k_proj, v_proj, or fused qkv_proj, which files hold as these three; and o_proj,
// without biases.  Source: Ainslie et al., "GQA", 2023.
class GroupedQueryAttention : public Module {
 public:
  // `rotary` may be shared; null leaves positions out.  Throws: ContractError for head counts that
  // do not divide.
  GroupedQueryAttention(const AttentionOptions& options, std::shared_ptr<Rotary> rotary,
                        const Device& device = Device::meta());
  // x_BTC -> [B, T, C].
  Tensor operator()(const Tensor& x_BTC, Caller at = Caller::current());
  // As Linear::takes_rounded.
  std::optional<Fp8Recipe> takes_rounded() const;

  Linear q_proj, k_proj, v_proj;  // without parameters where they are fused
  Linear qkv_proj;                // without parameters where they are not
  Linear o_proj;

 private:
  bool is_fused() const { return qkv_proj.weight.defined(); }
  Tensor attend(const Tensor& x_BTC);
  Tensor attend_fused(const Tensor& x_BTC);

  std::int64_t n_heads_, n_kv_heads_, head_dim_;
  std::shared_ptr<Rotary> rotary_;
};

// Names: c_attn (queries, keys and values side by side) and c_proj, with biases.  Source: Radford
// et al., GPT-2, 2019.
class FusedAttention : public Module {
 public:
  FusedAttention(std::int64_t dim, std::int64_t n_heads, const Device& device = Device::meta());
  // x_BTC -> [B, T, C].
  Tensor operator()(const Tensor& x_BTC, Caller at = Caller::current());
  // As Linear::takes_rounded.
  std::optional<Fp8Recipe> takes_rounded() const;

  Linear c_attn, c_proj;

 private:
  std::int64_t n_heads_;
};

}  // namespace tessera::nn
