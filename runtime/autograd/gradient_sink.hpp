// What operations know of gradient sinks (Gradients::sink), and of the
// dtypes that kernels give beside the one they compute in. For the .cpp files of operations.
#pragma once

#include "tessera/autograd/node.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::autograd {

// Of what kernels keep of each row, and of sums that are to be rounded once.
inline DType statistics_dtype(DType dtype) { return dtype == f64 ? f64 : f32; }

// Whether a kernel that computes in `dtype` can write to `sink` itself: in that dtype, or in f32.
inline bool can_write(const GradientSink& sink, DType dtype) {
  const DType to = sink.tensor.dtype();
  return to == dtype || (to == f32 && dtype != f64);
}

// The factor of what is there already.
inline double beta(const GradientSink& sink) { return sink.accumulate ? 1 : 0; }

// Writes a gradient of any dtype to `sink`, scaled, or adds it.
inline void write(const GradientSink& sink, const Tensor& gradient) {
  raw::axpby(sink.tensor, gradient, sink.scale, beta(sink));
}

// Hands on the gradient of input i that was made aside: to its sink, or else, where `out` had none,
// onwards in the dtype of the input.
inline void write_or_set(Gradients& out, int i, const std::optional<GradientSink>& sink,
                         const Tensor& gradient, DType dtype) {
  if (sink)
    write(*sink, gradient);
  else
    out.set(i, raw::cast(gradient, dtype));
}

}  // namespace tessera::autograd
