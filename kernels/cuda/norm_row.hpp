// A norm's packs from the statistics of their rows, for whoever writes them and whoever rounds them
// to 8 bits.
#pragma once

#include "kernels/cuda/vector.hpp"

namespace tessera::kernels::cuda {

// y = (x - mean) rstd weight + bias of some columns, before it is rounded to T; weight and bias may
// be null, and mean counts for kCenters alone. No product is part of an fma, so that all who make
// it have the same bits.
template <class T, int N, bool kCenters = true>
struct NormColumns {
  Held<T, N> weight = {}, bias = {};
  bool has_weight, has_bias;

  TESSERA_DEVICE NormColumns(const T* all_weight, const T* all_bias, std::int64_t first)
      : has_weight(all_weight != nullptr), has_bias(all_bias != nullptr) {
    if (has_weight) weight = load_held<N>(all_weight + first);
    if (has_bias) bias = load_held<N>(all_bias + first);
  }
  // Of column j of these.
  TESSERA_DEVICE Compute<T> get(Compute<T> x, int j, Compute<T> mean, Compute<T> rstd) const {
    Compute<T> v = rounded_product(kCenters ? x - mean : x, rstd);
    if (has_weight) v = rounded_product(v, value_of<T, N>(weight, j));
    if (has_bias) v += value_of<T, N>(bias, j);
    return v;
  }
};

}  // namespace tessera::kernels::cuda
