// The order of the elements of each row of a contiguous [rows, cols] view.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace tessera::kernels {

// order[r, k] = column of the element of in[r, :] that comes k-th, ascending or descending. NaN
// counts as larger than all, and of equal elements the first comes first, in both directions. Any
// dtype.
struct SortArgs {
  std::int64_t* order;
  const void* in;
  std::int64_t rows, cols;
  DType dtype;
  bool descending;
};

}  // namespace tessera::kernels
