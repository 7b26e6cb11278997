// Work on a list of ranges that only the device knows: ranges are cut into chunks, chunks are
// numbered through all ranges, and block b takes chunks b, b + blocks, ...
//
//   ranges   |aaaaaaa|bb|ccccc|      chunks   0 1 2 3 | 4 | 5 6 7      block 1 of 3: 1 4 7
//
// How many there are is not known on the host, so the grid follows the device: eight blocks for
// each multiprocessor, all that can run at once.
#pragma once

#include "kernels/cuda/device.hpp"
#include "kernels/cuda/gpu.hpp"

namespace tessera::kernels::cuda {

inline constexpr int kChunkThreads = 256;
inline Grid chunk_grid(int ranges) {
  return {ranges == 0 ? 0 : std::int64_t{8} * multiprocessors()};
}
// Shared memory of for_chunks: the chunks of kChunkThreads ranges.
inline constexpr std::size_t kChunkShared = kChunkThreads * sizeof(std::int64_t);

// Calls work(range, chunk of the range) for this block's chunks of `ranges` ranges, of which range
// r has chunks(r). All threads of the block take part, and `work` may not use barriers.
template <class Chunks, class Work>
TESSERA_DEVICE void for_chunks(Thread& t, int ranges, Chunks chunks, Work work) {
  auto* counts = t.shared<std::int64_t>();
  std::int64_t next = t.block();  // this block's next chunk, counted from the current range's first
  for (int base = 0; base < ranges; base += kChunkThreads) {
    t.sync();
    if (base + t.index() < ranges) counts[t.index()] = chunks(base + t.index());
    t.sync();
    for (int r = base; r < ranges && r < base + kChunkThreads; ++r) {
      const std::int64_t count = counts[r - base];
      for (; next < count; next += t.blocks()) work(r, next);
      next -= count;
    }
  }
}

// Calls vector(i) for the elements i, i + 1, .., i + 3 and single(i) for one, so that all of
// [begin, end) are met once, by the threads of a block; i of `vector` is a multiple of 4.
template <class Vector, class Single>
TESSERA_DEVICE void for_fours(Thread& t, std::int64_t begin, std::int64_t end, bool aligned,
                              Vector vector, Single single) {
  const std::int64_t first = begin / 4 * 4;
  for (std::int64_t i = first + 4 * t.index(); i < end; i += 4 * kChunkThreads) {
    if (aligned && i >= begin && i + 4 <= end) {
      vector(i);
    } else {
      TESSERA_UNROLL(1)
      for (std::int64_t j = i < begin ? begin : i; j < i + 4 && j < end; ++j) single(j);
    }
  }
}

}  // namespace tessera::kernels::cuda
