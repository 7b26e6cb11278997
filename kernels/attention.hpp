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
// contiguous. 16-bit floats compute in f32; lse is f32, f64 for f64. A GPU may round what enters a
// product, the softmax's weights and their derivatives, to the 16-bit type first, and so may it
// round each query head's part of dk and dv.
#pragma once

#include <algorithm>
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

// Whether tensor cores, by a library or by us, may compute attention over heads of this width; else
// kernels of ours do without.
constexpr bool attention_suits_library(std::int64_t head_dim, DType dtype) {
  return size_bytes(dtype) == 2 && is_floating(dtype) && head_dim % 8 == 0 && head_dim <= 128;
}
// Of what backward on tensor cores keeps: lse and delta, the sums over do o, f32 [B, H, T] each, T
// rounded up to whole tiles.
inline constexpr int kAttentionTile = 128;
constexpr std::int64_t attention_statistics_bytes(std::int64_t batch, std::int64_t length,
                                                  std::int64_t heads) {
  const std::int64_t tiles = (length + kAttentionTile - 1) / kAttentionTile;
  return 2 * batch * heads * tiles * kAttentionTile * 4;
}

// What backward may use beside its operands on a GPU: these statistics; where sums may have any
// order, a library's f32 dq, the parts of dk and dv of each query head where several read one, and
// a fixed part. None where it goes without tensor cores.
inline constexpr std::int64_t kAttentionFixedBytes = std::int64_t{32} << 20;
constexpr std::int64_t attention_workspace_bytes(std::int64_t batch, std::int64_t length,
                                                 std::int64_t heads, std::int64_t kv_heads,
                                                 std::int64_t head_dim, DType dtype,
                                                 bool deterministic) {
  if (!attention_suits_library(head_dim, dtype)) return 0;
  const std::int64_t statistics = attention_statistics_bytes(batch, length, heads);
  const std::int64_t dq = batch * length * heads * head_dim * 4;
  if (deterministic || dq == 0) return statistics;
  return std::max(statistics, (heads == kv_heads ? 1 : 2) * dq + kAttentionFixedBytes);
}

// Writes dq, dk and dv (never reads them first). They overlap nothing. On a GPU `workspace` has
// attention_workspace_bytes() bytes, 256-byte aligned; elsewhere it is null.
struct AttentionBackwardArgs {
  void *dq, *dk, *dv;
  const void *q, *k, *v, *o, *d_o, *lse;
  void* workspace;
  float scale;
  std::int32_t batch, length;
  std::uint16_t heads, kv_heads, head_dim;
  std::uint16_t q_row, k_row, v_row, dq_row, dk_row, dv_row;
  DType dtype;
  bool causal;
  bool deterministic;  // the same bits from every run; else a library may add dq up in any order
};
// By our kernels; a library may start others.
constexpr int launches_of(const AttentionBackwardArgs& /*args*/) { return 2; }

}  // namespace tessera::kernels
