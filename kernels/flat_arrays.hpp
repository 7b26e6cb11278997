// The flat arrays of sharding: casting a rank's shards to where its peers gather them, copying
// small chunks between there and where they are used, and completing gradients before a reduction.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// dst[entry.dst_bytes ...] = src[entry.src ...], `count` elements of src_dtype, per entry: of f32
// cast to bf16 or f16, or of any dtype of 1, 2 or 4 bytes as they are.
struct PackEntry {
  std::int64_t src, dst_bytes, count;
};
struct PackArgs {
  std::byte* dst;
  const std::byte* src;
  const PackEntry* entries;  // device memory
  std::int32_t entry_count;
  DType dst_dtype, src_dtype;
};

// One parameter's part of a gradient buffer: `used` bytes hold its gradient, the rest up to
// `padded` is padding.
struct FlatSpan {
  std::int64_t offset_bytes, used_bytes, padded_bytes;
};

// Completes the gradients of entries [first, first + 64): padding becomes 0; where bit i - first of
// `arrived` is not set and `zero_missing`, the whole span becomes 0. Entry i's arrival count is
// written to counts[i] of every one of `copies` arrays `counts_stride_bytes` apart: 1 where it
// arrived, else 0 (or left alone without `zero_missing`).
struct CompleteArgs {
  std::byte* base;
  const FlatSpan* entries;  // device memory
  std::byte* counts;
  std::int64_t counts_stride_bytes;
  std::uint64_t arrived;
  std::int32_t first, entry_count, copies;
  DType dtype;  // of the counts: floating
  bool zero_missing;
};

}  // namespace tessera::kernels
