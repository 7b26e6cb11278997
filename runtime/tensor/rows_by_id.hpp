// What sums of rows by id need beside their operands on a GPU; see kernels/rows_by_id.hpp. For the
// .cpp files of operations.
#pragma once

#include "tessera/tensor/tensor.hpp"

namespace tessera::detail {

// The positions of contiguous ids into n rows, ordered by id: i32. Undefined but on a GPU.
Tensor order_by_id(const Tensor& ids, std::int64_t n);

// order_by_id's order as a kernel takes it, null where it is undefined.
inline const std::int32_t* positions(const Tensor& order) {
  return order.defined() ? reinterpret_cast<const std::int32_t*>(order.data()) : nullptr;
}

// For the sums of [outer, count, cols] of `from` in `to`. Undefined where none is needed.
Tensor sums_workspace(const Device& device, std::int64_t outer, std::int64_t count,
                      std::int64_t cols, DType from, DType to);

}  // namespace tessera::detail
