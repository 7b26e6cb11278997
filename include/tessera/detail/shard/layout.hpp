// Where a unit's bytes lie: pure arithmetic over shapes, equal on every rank.
//
//   gather slot      a dtype each   │ p0: chunk 0, 1, ... N-1 │ p1: ... │ packed │
//   gradient piece   reduce dtype   │ p0: chunk 0, 1, ... N-1 │ p1: ... │ packed │ N times the
//   counts │ flat group       f32            │ p0: own chunk │ p1 │ ... │ counts │
//
// Every parameter starts at a multiple of 256 bytes. Its chunks are adjacent, so all of them are
// one contiguous tensor, with padding behind it. The gather slot holds the full parameters: each
// rank casts its own chunks into it, in-place all-gathers bring the others, and kernels read the
// parameters there. The gradient buffer holds the full gradients of one backward pass, in pieces: a
// parameter's lies in one of them. A piece has a count of 0 or 1 for each of its parameters, and
// one grouped reduce-scatter sums both over the ranks into this rank's flat gradient; see
// runtime/param/flat_group.hpp.
//
// Small chunks travel packed, those of a rank one behind the other, and are copied between there
// and their parameters: ShardOptions::packed_bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/param/parameter.hpp"
#include "tessera/param/shard_spec.hpp"

namespace tessera::shard {

// Chunks that travel as one item, in a gather without gaps, so that all of what a rank sends is
// values:
//
//   │ rank 0: p0 │ p1 │ p4 │ rank 1: p0 │ p1 │ p4 │ ...
struct PackedLayout {
  std::vector<std::size_t> entries{};  // of the unit's or piece's; two and more, or none
  std::vector<std::int64_t> at{};      // where each begins in a rank's part, elements
  std::int64_t numel = 0;              // of a rank's part
  std::int64_t offset_bytes = 0, bytes = 0;

  bool is_empty() const noexcept { return entries.empty(); }
  // `at` of an entry that is packed.
  std::optional<std::int64_t> place_of(std::size_t entry) const {
    const auto found = std::ranges::find(entries, entry);
    if (found == entries.end()) return {};
    return at[static_cast<std::size_t>(found - entries.begin())];
  }
  void add(std::size_t entry, std::int64_t elements) {
    entries.push_back(entry);
    at.push_back(numel);
    numel = checked_add(numel, elements);
  }
  // Gives it a place at `end`, unless it is one chunk alone, or would take more than half of
  // `unit_bytes`: then all go from where they lie.
  void place(std::int64_t& end, int world, DType dtype, std::int64_t unit_bytes) {
    const auto size = static_cast<std::int64_t>(size_bytes(dtype));
    bytes = round_up(checked_mul(checked_mul(numel, world), size), kAlignmentBytes);
    if (entries.size() < 2 || 2 * bytes > unit_bytes) return void(*this = {});
    offset_bytes = end;
    end = checked_add(end, bytes);
  }
};

// Which parameters of a unit have small chunks: of those that are gathered, all in one dtype, and
// of those that are reduced.
struct SmallChunks {
  std::vector<bool> gathered, reduced;
  DType dtype = f32;
};

// Of the trainable parameters, counted from 0, those from first to before end.
struct PieceLayout {
  std::size_t first = 0, end = 0;
  std::vector<std::int64_t> offset_bytes{};  // of each
  PackedLayout packed{};                     // of the first of them
  std::int64_t counts_offset_bytes = 0, bytes = 0;
};

struct UnitLayout {
  std::vector<std::int64_t> gather_offset_bytes;  // per parameter
  PackedLayout packed;                            // of those that are gathered so
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
  // last on, until `piece_bytes` are reached; less is no piece of its own. Those with small chunks
  // come first.  Throws: ContractError when sizes overflow.
  static UnitLayout make(const std::vector<ShardSpec>& specs, const std::vector<bool>& trainable,
                         const std::vector<std::int64_t>& gathered_bytes, DType reduce,
                         std::int64_t piece_bytes, const SmallChunks& small) {
    const auto append = [](std::int64_t& end, std::int64_t bytes) {
      return std::exchange(end, checked_add(end, bytes));
    };
    UnitLayout layout;
    std::vector<std::int64_t> gradients;  // of the trainable ones, bytes
    std::vector<std::int64_t> chunks;     // of those of them that are small, elements
    std::int64_t left = 0;                // of those without a piece
    for (std::size_t i = 0; i < specs.size(); ++i) {
      layout.gather_offset_bytes.push_back(append(layout.gather_bytes, gathered_bytes[i]));
      if (small.gathered[i]) layout.packed.add(i, specs[i].chunk_numel());
      if (!trainable[i]) continue;
      append(left, gradients.emplace_back(bytes_of(specs[i], reduce)));
      if (small.reduced[i]) chunks.push_back(specs[i].chunk_numel());
    }
    const std::int64_t trained_bytes = left;
    layout.packed.place(layout.gather_bytes, specs.empty() ? 1 : specs[0].world, small.dtype,
                        layout.gather_bytes);
    for (std::size_t end = gradients.size(), first = end; end > 0; end = first) {
      PieceLayout piece{.end = end};
      for (std::int64_t bytes = 0; first > 0 && std::min(bytes, left) < piece_bytes;) {
        bytes += gradients[--first];
        left -= gradients[first];
      }
      piece.first = first;
      for (std::size_t at = first; at < end; ++at)
        piece.offset_bytes.push_back(append(piece.bytes, gradients[at]));
      for (std::size_t at = first; at < std::min(end, chunks.size()); ++at)
        piece.packed.add(at - first, round_up(chunks[at], kAlignmentBytes / 4));  // as in f32
      piece.packed.place(piece.bytes, specs[0].world, reduce, trained_bytes);
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
