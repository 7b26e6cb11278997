// A norm's packs from the statistics of their rows, for whoever writes them and whoever rounds them
// to 8 bits.
#pragma once

#include "kernels/cuda/vector.hpp"

namespace tessera::kernels::cuda {

// y = (x - mean) rstd weight + bias of some columns, rounded to T; weight and bias may be null.
template <class T, int N>
struct NormColumns {
  Pack<T, N> weight, bias;
  bool has_weight, has_bias;

  TESSERA_DEVICE NormColumns(const T* all_weight, const T* all_bias, std::int64_t first)
      : has_weight(all_weight != nullptr), has_bias(all_bias != nullptr) {
    if (has_weight) weight = load<N>(all_weight + first);
    if (has_bias) bias = load<N>(all_bias + first);
  }
  // Element j of y, not yet rounded.
  TESSERA_DEVICE Compute<T> get(const Pack<T, N>& x, int j, Compute<T> mean,
                                Compute<T> rstd) const {
    Compute<T> v = (load_as_compute(x.at[j]) - mean) * rstd;
    if (has_weight) v *= load_as_compute(weight.at[j]);
    if (has_bias) v += load_as_compute(bias.at[j]);
    return v;
  }
  TESSERA_DEVICE Pack<T, N> operator()(const Pack<T, N>& x, Compute<T> mean,
                                       Compute<T> rstd) const {
    Pack<T, N> y;
    for (int j = 0; j < N; ++j) y.at[j] = rounded<T>(get(x, j, mean, rstd));
    return y;
  }
};

}  // namespace tessera::kernels::cuda
