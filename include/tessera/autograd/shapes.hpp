// Views, and copies whose elements only move. Negative dimensions count from the back.
#pragma once

#include <span>
#include <vector>

#include "tessera/autograd/node.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

// --- views of the same memory ---
Tensor reshape(const Tensor& x, const Shape& shape);  // a copy where no view is; one size may be -1
Tensor flatten(const Tensor& x, int first = 0, int last = -1);
Tensor squeeze(const Tensor& x);           // without any dimension of size 1
Tensor squeeze(const Tensor& x, int dim);  // without this one if its size is 1
Tensor unsqueeze(const Tensor& x, int dim);
Tensor transpose(const Tensor& x, int dim0, int dim1);
Tensor permute(const Tensor& x, std::span<const int> order);
inline Tensor permute(const Tensor& x, std::initializer_list<int> order) {
  return permute(x, std::span<const int>(order.begin(), order.size()));
}
Tensor expand(const Tensor& x, const Shape& shape);  // -1 keeps x's size
// Places begin, begin + step, .. below end of dim.
Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end, std::int64_t step = 1);
// Place i of dim, which is dropped; negative ones count from the end.
Tensor select(const Tensor& x, int dim, std::int64_t i);
// Elements whose place along dim1 is `offset` more than along dim0, as the last dimension.
Tensor diagonal(const Tensor& x, int offset = 0, int dim0 = 0, int dim1 = 1);
// Pieces of `size` along dim, and at most `count` pieces of one size; the last may be shorter.
std::vector<Tensor> split(const Tensor& x, std::int64_t size, int dim);
std::vector<Tensor> chunk(const Tensor& x, std::int64_t count, int dim = 0);

// --- copies ---
Tensor cat(std::span<const Tensor> parts, int dim);
Tensor stack(std::span<const Tensor> parts, int dim);
inline Tensor cat(std::initializer_list<Tensor> parts, int dim) {
  return cat(std::span<const Tensor>(parts.begin(), parts.size()), dim);
}
inline Tensor stack(std::initializer_list<Tensor> parts, int dim) {
  return stack(std::span<const Tensor>(parts.begin(), parts.size()), dim);
}
// The whole of x `times[d]` times along d; dimensions of one side alone stand in front.
Tensor repeat(const Tensor& x, const Shape& times);
// Each place of dim `times` times in a row.
Tensor repeat_interleave(const Tensor& x, std::int64_t times, int dim);
Tensor flip(const Tensor& x, const Dims& dims);
// Places move `by` towards the end of dim, and those beyond it come in at the front.
Tensor roll(const Tensor& x, std::int64_t by, int dim);
// `widths` [before, after] of the last dimension, then of the one in front of it, ..: so many
// elements `value` there; a negative width takes away.
Tensor pad(const Tensor& x, std::span<const std::int64_t> widths, double value = 0);
inline Tensor pad(const Tensor& x, std::initializer_list<std::int64_t> widths, double value = 0) {
  return pad(x, std::span<const std::int64_t>(widths.begin(), widths.size()), value);
}
// 0 above, or below, the diagonal that `diagonal` says of the last two dimensions.
Tensor tril(const Tensor& x, int diagonal = 0);
Tensor triu(const Tensor& x, int diagonal = 0);
// A vector as a matrix's diagonal, and a matrix's diagonal as a vector.
Tensor diag(const Tensor& x, int offset = 0);

}  // namespace tessera
