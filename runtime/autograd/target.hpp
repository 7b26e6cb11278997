// What operations know of the places that gradients are written to (Gradients::sink), and of the
// dtypes that kernels give beside the one they compute in. For the .cpp files of operations.
#pragma once

#include "tessera/autograd/node.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::autograd {

// Of what kernels keep of each row, and of sums that are to be rounded once.
inline DType statistics_dtype(DType dtype) { return dtype == f64 ? f64 : f32; }

// Whether a kernel that computes in `dtype` can write to `target` itself: in that dtype, or in f32.
inline bool can_write(const Leaf::Target& target, DType dtype) {
  const DType to = target.tensor.dtype();
  return to == dtype || (to == f32 && dtype != f64);
}

// The factor of what is there already.
inline double beta(const Leaf::Target& target) { return target.accumulate ? 1 : 0; }

// Writes a gradient of any dtype to `target`, scaled, or adds it.
inline void put(const Leaf::Target& target, const Tensor& gradient) {
  raw::axpby(target.tensor, gradient, target.scale, beta(target));
}

// The gradient of input i, made aside: to `target`, which `out` has given for it, or else onwards
// in the dtype of the input.
inline void give(Gradients& out, int i, const std::optional<Leaf::Target>& target,
                 const Tensor& gradient, DType dtype) {
  if (target)
    put(*target, gradient);
  else
    out.set(i, raw::cast(gradient, dtype));
}

}  // namespace tessera::autograd
