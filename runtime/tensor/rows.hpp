// Tensors as rows that lie at one stride, for kernels over rows; what SwiGLU takes of them.
#pragma once

#include "tessera/tensor/ops.hpp"

namespace tessera::detail {

struct RowsOf {
  Tensor tensor;
  std::int64_t rows, cols, stride;
};
// The rows of a tensor whose last dimension is contiguous and whose leading ones merge into one;
// else of a copy.
inline RowsOf rows_of(const Tensor& x) {
  TESSERA_EXPECT(x.ndim() >= 1, "an operation over rows needs at least one dimension");
  const std::int64_t cols = x.shape().back(), rows = cols == 0 ? 0 : x.numel() / cols;
  bool regular = x.strides().back() == 1 || cols == 1;
  std::int64_t stride = cols, merged = 1;
  for (int d = x.ndim() - 2; d >= 0; --d) {
    if (x.shape()[d] == 1) continue;  // its stride means nothing
    if (merged == 1) stride = x.strides()[d];
    regular = regular && x.strides()[d] == stride * merged;
    merged *= x.shape()[d];
  }
  return regular ? RowsOf{x, rows, cols, stride} : rows_of(raw::contiguous(x));
}

inline void expect_gated(const Tensor& gate, const Tensor& up) {
  TESSERA_EXPECT(gate.shape() == up.shape() && gate.dtype() == up.dtype(), "swiglu: gate is ",
                 gate.shape(), " of ", gate.dtype(), ", up is ", up.shape(), " of ", up.dtype());
}

}  // namespace tessera::detail
