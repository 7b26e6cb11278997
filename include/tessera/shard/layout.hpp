// Where a unit's bytes lie: pure arithmetic over shapes, equal on every rank.
//
//   gather slot      param dtype    │ p0: chunk 0, 1, ... N-1 │ p1: ... │
//   gradient buffer  reduce dtype   │ p0: chunk 0, 1, ... N-1 │ p1: ... │ N times the counts │
//   flat group       f32            │ p0: own chunk │ p1 │ ... │ counts │
//
// Every parameter starts at a multiple of 256 bytes. Its chunks are adjacent, so all of them are
// one contiguous tensor, with padding behind it. The gather slot holds the full parameters: each
// rank casts its own chunks into it, in-place all-gathers bring the others, and kernels read the
// parameters there. The gradient buffer holds the full gradients of one backward pass, and one
// count of 0 or 1 for each parameter. One grouped reduce-scatter sums both over the ranks into this
// rank's flat gradient; see param/flat_group.hpp.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/param/parameter.hpp"
#include "tessera/param/shard_spec.hpp"

namespace tessera::shard {

struct UnitLayout {
  std::vector<std::int64_t> gather_offset_bytes;  // per parameter
  std::int64_t gather_bytes = 0;
  std::vector<std::int64_t> gradient_offset_bytes;  // per parameter, -1 for frozen ones
  std::int64_t counts_offset_bytes = 0;
  std::int64_t counts_chunk_bytes = 0;
  std::int64_t gradient_buffer_bytes = 0;  // 0 when nothing is trainable

  // `specs` of one world, `trainable` for each; dtypes of the slot and of the buffer.
  // Throws: ContractError when sizes overflow.
  static UnitLayout make(const std::vector<ShardSpec>& specs, const std::vector<bool>& trainable,
                         DType param, DType reduce) {
    UnitLayout layout;
    std::int64_t count = 0;
    const auto take = [](std::int64_t& end, std::int64_t numel, DType dtype) {
      const std::int64_t begin = end;
      const auto size = static_cast<std::int64_t>(size_bytes(dtype));
      end = checked_add(end, round_up(checked_mul(numel, size), kAlignmentBytes));
      return begin;
    };
    for (std::size_t i = 0; i < specs.size(); ++i) {
      layout.gather_offset_bytes.push_back(
          take(layout.gather_bytes, specs[i].padded_numel(), param));
      layout.gradient_offset_bytes.push_back(
          trainable[i] ? take(layout.gradient_buffer_bytes, specs[i].padded_numel(), reduce) : -1);
      count += trainable[i] ? 1 : 0;
    }
    if (count > 0) {
      layout.counts_offset_bytes = layout.gradient_buffer_bytes;
      layout.counts_chunk_bytes =
          round_up(count, kFlatAlign) * static_cast<std::int64_t>(size_bytes(reduce));
      layout.gradient_buffer_bytes +=
          round_up(layout.counts_chunk_bytes * specs[0].world, kAlignmentBytes);
    }
    return layout;
  }
};

}  // namespace tessera::shard
