// What operations that are compositions do with their operands. For the .cpp files of operations.
#pragma once

#include "runtime/autograd/gradient_sink.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/autograd/shapes.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::autograd {

// In f32, or f64, so that what several operations make of it is rounded to 16 bits once.
inline Tensor widened(const Tensor& x) { return raw::cast(x, statistics_dtype(x.dtype())); }

inline void expect_floating(const Tensor& x) {
  TESSERA_EXPECT(is_floating(x.dtype()), "a tensor is ", x.dtype(),
                 ", expected a floating dtype; cast it first");
}

// Moves rows `of` a table as they are, also those of codes.
void look_up(const kernels::EmbeddingArgs& args, const Tensor& of,
             std::initializer_list<detail::Use> uses);
// Writes the gradient of input i, a table of `shape` of which the rows `ids` were taken, from that
// of these rows. ids [...], contiguous, and their detail::order_by_id.
void set_table(Gradients& out, int i, const Tensor& gradient, const Tensor& ids,
               const Tensor& order, const Shape& shape);

// What f makes of x [] as one element along a dimension 0, of shape [] again.
template <class F>
Tensor as_scalar(const Tensor& x, F f) {
  return reshape(f(reshape(x, {1})), {});
}

}  // namespace tessera::autograd
