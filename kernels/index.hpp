// Indexing along the middle dimension of contiguous [outer, n, inner] views, by i32 or i64.
//
// An index outside [0, n) reads as NaN (0 for integers and boolean) and adds or sets nothing.
// Additions happen in the order of the source's elements, in f32 for 16-bit floats, rounded at each
// addition; those of index_add on a GPU as rows_by_id.hpp says.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"
#include "kernels/rows_by_id.hpp"

namespace tessera::kernels {

// One struct for five kernels; `big` is [outer, n, inner], `small` [outer, count, inner].
// The index is [count] for the first two, [outer, count, inner] for the others.
//
//   index_select   small[o, j, i]              = big[o, index[j], i]
//   index_add      big[o, index[j], i]        += small[o, j, i]
//   gather         small[o, j, i]              = big[o, index[o, j, i], i]
//   scatter_add    big[o, index[o, j, i], i]  += small[o, j, i]
//   scatter        big[o, index[o, j, i], i]   = small[o, j, i], the last j where several agree
//
// index_select and gather write `small`, scatter `big`, and take any dtype but 8-bit floats; the
// additions write `big` and take any but boolean and those that are only stored. On a GPU index_add
// wants order_by_id's order of the index, and sums_workspace_bytes(outer, count, inner, dtype,
// dtype) bytes of workspace.
struct IndexArgs {
  void *big, *small;
  const void* index;
  std::int64_t outer, n, inner, count;
  DType dtype, index_dtype;
  const std::int32_t* order = nullptr;
  void* workspace = nullptr;
};
constexpr int launches_of(const IndexArgs& a) {
  return a.order == nullptr ? 1 : launches_of_sums(a.count);
}

}  // namespace tessera::kernels
