// Who has which rows of a parameter: pure arithmetic. FSDP2's chunking, so that shards compare one
// to one: for d0 rows and N ranks a chunk has ceil(d0 / N) rows, rank r has [r c, (r + 1) c) cut
// at d0, and the last ranks may have none.
//
//   d0 = 10, N = 4, c = 3   rank 0: 0..2   rank 1: 3..5   rank 2: 6..8   rank 3: 9 and 2 of padding
#pragma once

#include <algorithm>
#include <cstdint>

#include "tessera/base/dtype.hpp"
#include "tessera/tensor/shape.hpp"

namespace tessera {

struct RowRange {
  std::int64_t begin = 0, end = 0;
  constexpr std::int64_t size() const { return end - begin; }
  bool operator==(const RowRange&) const = default;
};

// A parameter of `shape` cut along dimension 0 over `world` ranks; world 1 is the whole parameter.
struct ShardSpec {
  Shape shape;
  int world = 1;
  int rank = 0;
  // Rows of a chunk, where it is not that of FSDP2: in a slice of a parameter that is cut already.
  std::int64_t rows_of_chunk = 0;

  constexpr std::int64_t rows() const { return shape.ndim() == 0 ? 1 : shape[0]; }
  // Elements of one row.
  constexpr std::int64_t row_numel() const {
    std::int64_t n = 1;
    for (int d = 1; d < shape.ndim(); ++d) n = checked_mul(n, shape[d]);
    return n;
  }
  constexpr std::int64_t chunk_rows() const {
    return rows_of_chunk > 0 ? rows_of_chunk : ceil_div(rows(), world);
  }
  // Elements of every rank's chunk, padding included.
  constexpr std::int64_t chunk_numel() const { return checked_mul(chunk_rows(), row_numel()); }
  // Elements of all chunks, padding included.
  constexpr std::int64_t padded_numel() const { return checked_mul(chunk_numel(), world); }

  // The rows of rank r.
  constexpr RowRange owned(int r) const {
    const std::int64_t begin = std::min(r * chunk_rows(), rows());
    return {begin, std::min(begin + chunk_rows(), rows())};
  }
  constexpr RowRange owned() const { return owned(rank); }
  // Shape of this rank's rows without padding; [0, ...] for an empty shard. A scalar is one row,
  // rank 0's; its shape is [] everywhere, and what lies on the other ranks is padding.
  constexpr Shape local_shape() const {
    return shape.ndim() == 0 ? shape : shape.with(0, owned().size());
  }
};

static_assert(ShardSpec{{10}, 4, 3}.owned() == RowRange{9, 10});
static_assert(ShardSpec{{3, 2}, 4, 3}.owned() == RowRange{3, 3} &&
              ShardSpec{{3, 2}, 4}.chunk_numel() == 2);
static_assert(ShardSpec{{17}, 128, 16}.owned() == RowRange{16, 17} &&
              ShardSpec{{17}, 128, 17}.owned().size() == 0);

}  // namespace tessera
