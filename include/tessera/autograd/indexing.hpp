// Reading and writing at indices, which are i32 or i64 tensors; and x[...] of Python, as a list.
//
//   index(x, {0})                      x[0]
//   index(x, {Range{1, 9, 2}, -1})     x[1:9:2, -1]
//   index(x, {ellipsis, rows})         x[..., rows], rows a tensor
//
// Writing gives a new tensor. A boolean tensor can't choose, since the shape of the result would
// depend on values, and no plan would know it: masked_fill and where take its place.
#pragma once

#include <concepts>
#include <optional>
#include <span>
#include <variant>

#include "tessera/autograd/node.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

// --- x[...] ---
// Indices begin, begin + step, .. below end, by Python's rules, with a step of at least 1. Without
// numbers: all of them.
struct Range {
  std::optional<std::int64_t> begin{}, end{};
  std::int64_t step = 1;
};
struct Ellipsis {};  // all dimensions that the other indices leave
struct NewAxis {};   // a new dimension of size 1
inline constexpr Ellipsis ellipsis;
inline constexpr NewAxis new_axis;

struct Index {
  template <std::integral I>
  Index(I position) : value(static_cast<std::int64_t>(position)) {}
  Index(const Range& range) : value(range) {}
  Index(Ellipsis all) : value(all) {}
  Index(NewAxis axis) : value(axis) {}
  Index(const Tensor& positions) : value(positions) {}

  std::variant<std::int64_t, Range, Ellipsis, NewAxis, Tensor> value;
};
// Numbers and ranges make a view. Tensors broadcast to one shape, which stands where they do; if
// other dimensions lie between them, it stands in front. Negative indices count from the end. One
// out of range reads as NaN.
Tensor index(const Tensor& x, std::span<const Index> at, Caller line = Caller::current());
inline Tensor index(const Tensor& x, std::initializer_list<Index> at,
                    Caller line = Caller::current()) {
  return index(x, std::span<const Index>(at.begin(), at.size()), line);
}
// x with `values`, which broadcast, set or added at the positions that index(x, {at[0], at[1], ..})
// reads. If several fall on one position, the last is set and gets the gradient; PyTorch gives it
// to all.
enum class Put { set, add };
Tensor index_put(const Tensor& x, std::span<const Tensor> at, const Tensor& values,
                 Put put = Put::set, Caller line = Caller::current());
inline Tensor index_put(const Tensor& x, std::initializer_list<Tensor> at, const Tensor& values,
                        Put put = Put::set, Caller line = Caller::current()) {
  return index_put(x, std::span<const Tensor>(at.begin(), at.size()), values, put, line);
}

// --- along one dimension ---
// An index out of range reads as NaN (0 for integers and boolean) and writes nothing.
// index_select: rows `index` [count] of dim. index_copy, index_add: x with the rows of `source`
// set, or added, there.
Tensor index_select(const Tensor& x, int dim, const Tensor& index, Caller at = Caller::current());
Tensor index_copy(const Tensor& x, int dim, const Tensor& index, const Tensor& source,
                  Caller at = Caller::current());
Tensor index_add(const Tensor& x, int dim, const Tensor& index, const Tensor& source,
                 Caller at = Caller::current());
// gather: x at `index` along dim. scatter, scatter_add: x with the elements of `source` set, or
// added, there. In the other dimensions the index is as large as x or smaller, and `source` as
// large as the index or larger.
Tensor gather(const Tensor& x, int dim, const Tensor& index, Caller at = Caller::current());
Tensor scatter(const Tensor& x, int dim, const Tensor& index, const Tensor& source,
               Caller at = Caller::current());
Tensor scatter(const Tensor& x, int dim, const Tensor& index, double value,
               Caller at = Caller::current());
Tensor scatter_add(const Tensor& x, int dim, const Tensor& index, const Tensor& source,
                   Caller at = Caller::current());

}  // namespace tessera
