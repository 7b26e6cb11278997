// What attention's backward pass on tensor cores has in common for all GPUs.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/cuda/attention_tiles.hpp"

namespace tessera::kernels::cuda {

// f32 [B, H, T'] each, T' in whole tiles: log2(e) lse and delta, infinity and 0 beyond T, so that
// no query there counts.
struct AttentionStatistics {
  float *lse, *delta;
  int length;  // T'
};

// Rows `row` and row + 8 of what products of a warp have summed, times `factor`, where there are
// such rows: 8 n columns from `first` on, of those that there are. `row` is the lane's.
template <class T, int n>
TESSERA_DEVICE void store_two_rows(const AttentionBackwardArgs& a,
                                   const attention_tiles::Head<T>& to, int row, int first, int lane,
                                   const float (&sums)[n][4], float factor) {
  unrolled<2>([&](int i) {
    const int at = row + i * 8;
    T* const line = to.data + at * to.stride + lane % 4 * 2;
    if (at < a.length)
      unrolled<n>([&](int j) {
        const float(&x)[4] = sums[j];
        if (first + j * 8 < a.head_dim)
          *reinterpret_cast<std::uint32_t*>(line + first + j * 8) =
              pair_of<T>(x[i * 2] * factor, x[i * 2 + 1] * factor);
      });
  });
}

// The walks by keys and by queries by products of warpgroups; false where the device has none,
// and nothing is queued.
bool walk_by_warpgroups(const AttentionBackwardArgs& a, const AttentionStatistics& statistics,
                        Exec& exec);

}  // namespace tessera::kernels::cuda
