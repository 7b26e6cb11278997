// Initial values by global index: element e of the whole parameter has a value that depends on
// (key, e) only, so any rank may fill any range [begin, begin + count) of it.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// out[i] is element begin + i, floating. With w = philox(key, e / 2), u = (2^32 w[0] + w[1] + 1/2)
// 2^-64 (rounded to f64) and t = (2^32 w[2] + w[3]) 2^-64, elements 2j and 2j + 1 are mean + std
// sqrt(-2 ln u) cos(2 pi t) and the same with sin, in f64, rounded once to the dtype. Source: Box
// and Muller, "A note on the generation of random normal deviates", 1958.
struct NormalArgs {
  void* out;
  std::uint64_t key;
  std::int64_t begin, count;
  double mean, std;
  DType dtype;
};

// low + (high - low) unit_float(philox(key, e / 4)[e % 4]), in f64, rounded once to the dtype.
struct UniformArgs {
  void* out;
  std::uint64_t key;
  std::int64_t begin, count;
  double low, high;
  DType dtype;
};

}  // namespace tessera::kernels
