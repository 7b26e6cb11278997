// Sums and maxima over a warp and a block, in an order that depends on the block's size only.
#pragma once

#include <cmath>

#include "kernels/cuda/gpu.hpp"

namespace tessera::kernels::cuda {

struct Sum {
  template <class T>
  TESSERA_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};
// NaN wins.
struct Max {
  template <class T>
  TESSERA_DEVICE T operator()(T a, T b) const {
    return larger(a, b);
  }
};

// A NaN loses.
struct LargerMagnitude {
  TESSERA_DEVICE float operator()(float a, float b) const { return std::fmax(a, b); }
};

// Of all lanes, on every lane.
template <class T, class F>
TESSERA_DEVICE T warp_reduce(Thread& t, T value, F combine) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2)
    value = combine(value, t.shuffle_xor(value, mask));
  return value;
}

// Of all kThreads threads, on every thread. `scratch`: shared, kThreads / kWarp elements; free for
// another use after the next barrier.
template <int kThreads, class T, class F>
TESSERA_DEVICE T block_reduce(Thread& t, T value, T* scratch, F combine) {
  value = warp_reduce(t, value, combine);
  if constexpr (kThreads == kWarp) return value;
  if (t.lane() == 0) scratch[t.warp()] = value;
  t.sync();
  T all = scratch[0];
  for (int w = 1; w < kThreads / kWarp; ++w) all = combine(all, scratch[w]);
  return all;
}

}  // namespace tessera::kernels::cuda
