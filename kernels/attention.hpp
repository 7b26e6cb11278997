// Scaled dot-product attention with grouped-query heads, in tiles: no T x T buffer exists.
// Source: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning",
// 2023.
//
//   q, o, dq, do  [B, T, H, D]      head h of q reads head h / (H / Hkv) of k and v
//   k, v, dk, dv  [B, T, Hkv, D]
//   lse           [B, H, T]         log of the softmax's denominator, kept for the backward pass
//
// o = softmax(scale q k^T) v, over the keys s <= t where causal, else over all.
//
// A row (one b and t) has its heads side by side, and rows lie `*_row` heads, that is `*_row * D`
// elements, apart; rows of consecutive t and b follow each other. So q, k and v may be views of one
// fused [B, T, H + 2 Hkv, D] projection, and dq, dk, dv views of its gradient. o and do are
// contiguous. 16-bit floats compute in f32; lse is f32, f64 for f64.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

inline constexpr int kAttentionMaxHeadDim = 256;  // D is at most this

struct AttentionArgs {
  void *o, *lse;
  const void *q, *k, *v;
  float scale;
  std::int32_t batch, length;               // B, T
  std::uint16_t heads, kv_heads, head_dim;  // H, Hkv (divides H), D
  std::uint16_t q_row, k_row, v_row;
  DType dtype;
  bool causal;
};

// Writes dq, dk and dv (never reads them first). They overlap nothing.
struct AttentionBackwardArgs {
  void *dq, *dk, *dv;
  const void *q, *k, *v, *o, *d_o, *lse;
  float scale;
  std::int32_t batch, length;
  std::uint16_t heads, kv_heads, head_dim;
  std::uint16_t q_row, k_row, v_row, dq_row, dk_row, dv_row;
  DType dtype;
  bool causal;
};

}  // namespace tessera::kernels
