// Views, and copies whose elements only move. Negative dimensions count from the back.
#pragma once

#include <span>
#include <vector>

#include "tessera/autograd/node.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

// --- views of the same memory ---
// A view, or a copy if the layout allows none; one size may be -1.
Tensor reshape(const Tensor& x, const Shape& shape, Caller at = Caller::current());
Tensor flatten(const Tensor& x, int first = 0, int last = -1, Caller at = Caller::current());
// x without its dimensions of size 1; or without `dim`, if its size is 1.
Tensor squeeze(const Tensor& x, Caller at = Caller::current());
Tensor squeeze(const Tensor& x, int dim, Caller at = Caller::current());
Tensor unsqueeze(const Tensor& x, int dim, Caller at = Caller::current());
Tensor transpose(const Tensor& x, int dim0, int dim1, Caller at = Caller::current());
Tensor permute(const Tensor& x, std::span<const int> order, Caller at = Caller::current());
inline Tensor permute(const Tensor& x, std::initializer_list<int> order,
                      Caller at = Caller::current()) {
  return permute(x, std::span<const int>(order.begin(), order.size()), at);
}
// Sizes of 1 become those of shape; -1 keeps x's size.
Tensor expand(const Tensor& x, const Shape& shape, Caller at = Caller::current());
// Indices begin, begin + step, .. below end of dim, as x[begin:end:step] in Python. Negative
// indices count from the end, so an end of -1 leaves the last one out. Indices beyond either end
// stop there.
Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end, std::int64_t step = 1,
             Caller at = Caller::current());
// Index i of dim, and dim is dropped. A negative i counts from the end.
Tensor select(const Tensor& x, int dim, std::int64_t i, Caller at = Caller::current());
// The elements whose position along dim1 is `offset` more than along dim0, as the last dimension.
Tensor diagonal(const Tensor& x, int offset = 0, int dim0 = 0, int dim1 = 1,
                Caller at = Caller::current());
// split: pieces of `size` along dim. chunk: at most `count` pieces of one size. The last may be
// shorter.
std::vector<Tensor> split(const Tensor& x, std::int64_t size, int dim,
                          Caller at = Caller::current());
std::vector<Tensor> chunk(const Tensor& x, std::int64_t count, int dim = 0,
                          Caller at = Caller::current());

// --- copies ---
Tensor contiguous(const Tensor& x, Caller at = Caller::current());  // x itself if it is
Tensor cat(std::span<const Tensor> parts, int dim, Caller at = Caller::current());
Tensor stack(std::span<const Tensor> parts, int dim, Caller at = Caller::current());
inline Tensor cat(std::initializer_list<Tensor> parts, int dim, Caller at = Caller::current()) {
  return cat(std::span<const Tensor>(parts.begin(), parts.size()), dim, at);
}
inline Tensor stack(std::initializer_list<Tensor> parts, int dim, Caller at = Caller::current()) {
  return stack(std::span<const Tensor>(parts.begin(), parts.size()), dim, at);
}
// x `times[d]` times along each d. If x or times has fewer dimensions, it is filled up in front.
Tensor repeat(const Tensor& x, const Shape& times, Caller at = Caller::current());
// Repeats each position of dim `times` times in a row.
Tensor repeat_interleave(const Tensor& x, std::int64_t times, int dim,
                         Caller at = Caller::current());
Tensor flip(const Tensor& x, const Dims& dims, Caller at = Caller::current());
// Moves elements `by` indices towards the end of dim; those that pass it come in at the front.
Tensor roll(const Tensor& x, std::int64_t by, int dim, Caller at = Caller::current());
// `widths` are [before, after] of the last dimension, then of the one in front of it, and so on. So
// many elements `value` are added there. A negative width takes elements away.
Tensor pad(const Tensor& x, std::span<const std::int64_t> widths, double value = 0,
           Caller at = Caller::current());
inline Tensor pad(const Tensor& x, std::initializer_list<std::int64_t> widths, double value = 0,
                  Caller at = Caller::current()) {
  return pad(x, std::span<const std::int64_t>(widths.begin(), widths.size()), value, at);
}
// x with 0 above (tril), or below (triu), the diagonal number `diagonal` of the last two
// dimensions.
Tensor tril(const Tensor& x, int diagonal = 0, Caller at = Caller::current());
Tensor triu(const Tensor& x, int diagonal = 0, Caller at = Caller::current());
// A vector becomes a matrix's diagonal, and a matrix's diagonal a vector.
Tensor diag(const Tensor& x, int offset = 0, Caller at = Caller::current());

}  // namespace tessera
