// Where a unit's bytes lie: pure arithmetic over shapes, equal on every rank.
//
//   gather slot      a dtype each   │ p0: chunk 0, 1, ... N-1 │ p1: ... │
//   gradient piece   reduce dtype   │ p0: chunk 0, 1, ... N-1 │ p1: ... │ N times the counts │
//   flat group       f32            │ p0: own chunk │ p1 │ ... │ counts │
//
// Every parameter starts at a multiple of 256 bytes. Its chunks are adjacent, so all of them are
// one contiguous tensor, with padding behind it. The gather slot holds the full parameters: each
// rank casts its own chunks into it, in-place all-gathers bring the others, and kernels read the
// parameters there. The gradient buffer holds the full gradients of one backward pass, in pieces: a
// parameter's lies in one of them. A piece has a count of 0 or 1 for each of its parameters, and
// one grouped reduce-scatter sums both over the ranks into this rank's flat gradient; see
// runtime/param/flat_group.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/param/parameter.hpp"
#include "tessera/param/shard_spec.hpp"

namespace tessera::shard {

// Of the trainable parameters, counted from 0, those from first to before end.
struct PieceLayout {
  std::size_t first = 0, end = 0;
  std::vector<std::int64_t> offset_bytes{};  // of each
  std::int64_t counts_offset_bytes = 0, bytes = 0;
};

struct UnitLayout {
  std::vector<std::int64_t> gather_offset_bytes;  // per parameter
  std::int64_t gather_bytes = 0;
  std::vector<PieceLayout> pieces;         // in the order in which they are reduced
  std::int64_t gradient_buffer_bytes = 0;  // of all pieces

  // Of all chunks in `dtype`, up to where the next parameter begins.
  static std::int64_t bytes_of(const ShardSpec& spec, DType dtype) {
    const auto size = static_cast<std::int64_t>(size_bytes(dtype));
    return round_up(checked_mul(spec.padded_numel(), size), kAlignmentBytes);
  }

  // `specs` of one world, for each whether it is trainable and what it takes of the slot; the dtype
  // of the buffer. Backward comes to the last parameters first, so a piece has parameters from the
  // last on, until `piece_bytes` are reached; less is no piece of its own.  Throws: ContractError
  // when sizes overflow.
  static UnitLayout make(const std::vector<ShardSpec>& specs, const std::vector<bool>& trainable,
                         const std::vector<std::int64_t>& gathered_bytes, DType reduce,
                         std::int64_t piece_bytes) {
    const auto append = [](std::int64_t& end, std::int64_t bytes) {
      return std::exchange(end, checked_add(end, bytes));
    };
    UnitLayout layout;
    std::vector<std::int64_t> gradients;  // of the trainable ones, bytes
    std::int64_t left = 0;                // of those without a piece
    for (std::size_t i = 0; i < specs.size(); ++i) {
      layout.gather_offset_bytes.push_back(append(layout.gather_bytes, gathered_bytes[i]));
      if (trainable[i]) append(left, gradients.emplace_back(bytes_of(specs[i], reduce)));
    }
    for (std::size_t end = gradients.size(), first = end; end > 0; end = first) {
      PieceLayout piece{.end = end};
      for (std::int64_t bytes = 0; first > 0 && std::min(bytes, left) < piece_bytes;) {
        bytes += gradients[--first];
        left -= gradients[first];
      }
      piece.first = first;
      for (std::size_t at = first; at < end; ++at)
        piece.offset_bytes.push_back(append(piece.bytes, gradients[at]));
      const auto counts = static_cast<std::int64_t>(end - first) * specs[0].world;
      piece.counts_offset_bytes =
          append(piece.bytes,
                 round_up(counts * static_cast<std::int64_t>(size_bytes(reduce)), kAlignmentBytes));
      append(layout.gradient_buffer_bytes, piece.bytes);
      layout.pieces.push_back(std::move(piece));
    }
    return layout;
  }
};

}  // namespace tessera::shard
