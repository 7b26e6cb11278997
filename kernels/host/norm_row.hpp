// A row of a norm from its statistics, for whoever writes it and whoever rounds it to 8 bits.
#pragma once

#include "kernels/host/rows.hpp"

namespace tessera::kernels::host {

// y = (x - mean) rstd weight + bias of n elements; weight and bias may be null.
template <class T>
void write_normed(T* y, const T* x, const T* weight, const T* bias, Compute<T> mean,
                  Compute<T> rstd, std::int64_t n) {
  using C = Compute<T>;
  const Vec<C> center(mean), scale(rstd);
  for_lanes<C>(n, [&](std::int64_t i, auto io) {
    Vec<C> v = (io.load(x + i) - center) * scale;
    if (weight != nullptr) v = v * io.load(weight + i);
    if (bias != nullptr) v = v + io.load(bias + i);
    io.store(y + i, v);
  });
}

}  // namespace tessera::kernels::host
