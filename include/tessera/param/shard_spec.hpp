// Which rank has which rows of a parameter: pure arithmetic. Even chunks are those of FSDP2, so
// that shards compare one to one. For d0 rows and N ranks a chunk has c = ceil(d0 / N) rows. Rank r
// has the rows [r c, (r + 1) c), cut at d0. The last ranks may have none.
//
//   d0 = 10, N = 4, c = 3   rank 0: 0..2   rank 1: 3..5   rank 2: 6..8   rank 3: 9 and 2 of padding
//
// Ragged shards (veScale: RaggedShard) deal out blocks of rows, which no rank cuts. Each rank has
// one range of blocks, without padding. Blocks that are left over go to one rank each.
//
//   d0 = 10, N = 4, blocks of 2 rows, left over from rank 3 on
//                           rank 0: 0..1   rank 1: 2..3   rank 2: 4..5   rank 3: 6..9
//
// A parameter may also be cut along another dimension, evenly. The slices of that dimension are
// then the "rows", and memory holds them one behind the other. So what is said of rows holds for
// them. The full tensor is a view with that dimension outermost.
//
//   [2, 4] along 1, N = 2   rank 0: columns 0 and 1, in memory a00 a10 a01 a11   rank 1: 2 and 3
#pragma once

#include <algorithm>
#include <cstdint>

#include "tessera/base/dtype.hpp"
#include "tessera/tensor/shape.hpp"

namespace tessera {

class Tensor;

// The dimension along which a mesh's ranks cut a tensor, counted from the front. Only ShardOptions
// take a negative one, counted from the back.
struct Shard {
  int dim = 0;
  bool operator==(const Shard&) const = default;
};

struct RowRange {
  std::int64_t begin = 0, end = 0;
  constexpr std::int64_t size() const { return end - begin; }
  bool operator==(const RowRange&) const = default;
};

// A parameter of `shape`, cut along dimension `dim` over `world` ranks. A world of 1 has it whole.
struct ShardSpec {
  Shape shape;
  int world = 1;
  int rank = 0;
  // Rows of a chunk, if it is not FSDP2's; 0: it is. A slice of a parameter that is cut already has
  // such chunks.
  std::int64_t rows_of_chunk = 0;
  // Ragged: rows of a block, and the first rank that gets a block that is left over; the next ranks
  // get the others. 0: even.
  std::int64_t block_rows = 0;
  int extra_from = 0;
  int dim = 0;  // other than 0: cut evenly, neither ragged nor in slices

  bool operator==(const ShardSpec&) const = default;
  // Whether the shape has the dimension that is cut. All functions below require it.
  constexpr bool has_dim() const { return dim == 0 || (dim > 0 && dim < shape.ndim()); }
  constexpr std::int64_t rows() const { return shape.ndim() == 0 ? 1 : shape[dim]; }
  // Elements of one row.
  constexpr std::int64_t row_numel() const {
    std::int64_t n = 1;
    for (int d = 0; d < shape.ndim(); ++d) n = d == dim ? n : checked_mul(n, shape[d]);
    return n;
  }
  constexpr bool is_ragged() const { return block_rows > 0; }
  constexpr std::int64_t blocks() const { return ceil_div(rows(), block_rows); }
  // Blocks of all ranks before r.
  constexpr std::int64_t blocks_before(int r) const {
    const std::int64_t each = blocks() / world, extra = blocks() % world,
                       around = std::max(extra_from + extra - world, std::int64_t{0});
    return each * r + std::min<std::int64_t>(r, around) +
           std::clamp<std::int64_t>(r - extra_from, 0, extra - around);
  }

  // Rows of this rank's chunk, padding included. Even chunks have the same rows on every rank.
  constexpr std::int64_t chunk_rows() const {
    if (is_ragged()) return owned().size();
    return rows_of_chunk > 0 ? rows_of_chunk : ceil_div(rows(), world);
  }
  // Elements of this rank's chunk, padding included, and of all chunks before it.
  constexpr std::int64_t chunk_numel() const { return checked_mul(chunk_rows(), row_numel()); }
  constexpr std::int64_t chunk_begin() const {
    return is_ragged() ? owned().begin * row_numel() : rank * chunk_numel();
  }
  // Elements of all chunks, padding included.
  constexpr std::int64_t padded_numel() const {
    return is_ragged() ? checked_mul(rows(), row_numel()) : checked_mul(chunk_numel(), world);
  }

  // The rows of rank r.
  constexpr RowRange owned(int r) const {
    if (is_ragged())
      return {std::min(blocks_before(r) * block_rows, rows()),
              std::min(blocks_before(r + 1) * block_rows, rows())};
    const std::int64_t begin = std::min(r * chunk_rows(), rows());
    return {begin, std::min(begin + chunk_rows(), rows())};
  }
  constexpr RowRange owned() const { return owned(rank); }
  // The most rows that any rank of a ragged one has.
  constexpr std::int64_t most_rows() const {
    return std::min(ceil_div(blocks(), world) * block_rows, rows());
  }
  // Shape of this rank's rows without padding; [0, ...] for an empty shard. A scalar is one row of
  // rank 0. Its shape is [] on every rank, and what lies on the other ranks is padding.
  constexpr Shape local_shape() const {
    return shape.ndim() == 0 ? shape : shape.with(dim, owned().size());
  }
  // Strides of an array of these sizes, the whole or a part of its rows, with `dim` outermost in
  // memory.
  constexpr Shape strides(const Shape& sizes) const {
    Shape out = sizes.strides();
    if (dim == 0) return out;
    for (int d = 0; d < dim; ++d) out[d] /= std::max<std::int64_t>(sizes[dim], 1);
    out[dim] = sizes.with(dim, 1).numel();
    return out;
  }
};

// A view of this rank's rows of `whole`. A scalar is whole on every rank.
Tensor rows_of(const Tensor& whole, const ShardSpec& spec);

}  // namespace tessera
