// Views, and copies whose elements only move. Negative dimensions count from the back.
#pragma once

#include <span>
#include <vector>

#include "tessera/autograd/node.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

// --- views of the same memory ---
// A copy where no view is; one size may be -1.
Tensor reshape(const Tensor& x, const Shape& shape, Caller at = Caller::current());
Tensor flatten(const Tensor& x, int first = 0, int last = -1, Caller at = Caller::current());
// Without any dimension of size 1, or without this one if its size is 1.
Tensor squeeze(const Tensor& x, Caller at = Caller::current());
Tensor squeeze(const Tensor& x, int dim, Caller at = Caller::current());
Tensor unsqueeze(const Tensor& x, int dim, Caller at = Caller::current());
Tensor transpose(const Tensor& x, int dim0, int dim1, Caller at = Caller::current());
Tensor permute(const Tensor& x, std::span<const int> order, Caller at = Caller::current());
inline Tensor permute(const Tensor& x, std::initializer_list<int> order,
                      Caller at = Caller::current()) {
  return permute(x, std::span<const int>(order.begin(), order.size()), at);
}
// Sizes of 1 become those of shape, where -1 keeps x's size.
Tensor expand(const Tensor& x, const Shape& shape, Caller at = Caller::current());
// Indices begin, begin + step, .. below end of dim, as x[begin:end:step] in Python: negative ones
// count from the end, and those beyond either end stop there, so that -1 leaves the last one out.
Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end, std::int64_t step = 1,
             Caller at = Caller::current());
// Index i of dim, which is dropped; negative ones count from the end.
Tensor select(const Tensor& x, int dim, std::int64_t i, Caller at = Caller::current());
// Elements whose position along dim1 is `offset` more than along dim0, as the last dimension.
Tensor diagonal(const Tensor& x, int offset = 0, int dim0 = 0, int dim1 = 1,
                Caller at = Caller::current());
// Pieces of `size` along dim, and at most `count` pieces of one size; the last may be shorter.
std::vector<Tensor> split(const Tensor& x, std::int64_t size, int dim,
                          Caller at = Caller::current());
std::vector<Tensor> chunk(const Tensor& x, std::int64_t count, int dim = 0,
                          Caller at = Caller::current());

// --- copies ---
Tensor contiguous(const Tensor& x, Caller at = Caller::current());  // x itself when it is
Tensor cat(std::span<const Tensor> parts, int dim, Caller at = Caller::current());
Tensor stack(std::span<const Tensor> parts, int dim, Caller at = Caller::current());
inline Tensor cat(std::initializer_list<Tensor> parts, int dim, Caller at = Caller::current()) {
  return cat(std::span<const Tensor>(parts.begin(), parts.size()), dim, at);
}
inline Tensor stack(std::initializer_list<Tensor> parts, int dim, Caller at = Caller::current()) {
  return stack(std::span<const Tensor>(parts.begin(), parts.size()), dim, at);
}
// The whole of x `times[d]` times along d; dimensions of one side alone stand in front.
Tensor repeat(const Tensor& x, const Shape& times, Caller at = Caller::current());
// Each position of dim `times` times in a row.
Tensor repeat_interleave(const Tensor& x, std::int64_t times, int dim,
                         Caller at = Caller::current());
Tensor flip(const Tensor& x, const Dims& dims, Caller at = Caller::current());
// What dim holds moves `by` indices towards its end, and what passes it comes in at the front.
Tensor roll(const Tensor& x, std::int64_t by, int dim, Caller at = Caller::current());
// `widths` [before, after] of the last dimension, then of the one in front of it, ..: so many
// elements `value` there; a negative width takes away.
Tensor pad(const Tensor& x, std::span<const std::int64_t> widths, double value = 0,
           Caller at = Caller::current());
inline Tensor pad(const Tensor& x, std::initializer_list<std::int64_t> widths, double value = 0,
                  Caller at = Caller::current()) {
  return pad(x, std::span<const std::int64_t>(widths.begin(), widths.size()), value, at);
}
// 0 above, or below, the diagonal that `diagonal` says of the last two dimensions.
Tensor tril(const Tensor& x, int diagonal = 0, Caller at = Caller::current());
Tensor triu(const Tensor& x, int diagonal = 0, Caller at = Caller::current());
// A vector as a matrix's diagonal, and a matrix's diagonal as a vector.
Tensor diag(const Tensor& x, int offset = 0, Caller at = Caller::current());

}  // namespace tessera
