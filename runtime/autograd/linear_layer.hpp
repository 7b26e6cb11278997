// What linear layers do alike, whatever multiplies: operands as rows, and gradients on their way,
// the parameters' straight to their sinks, the input's added to what is there. Products are
// functions of (out, alpha, beta), for out = alpha product + beta out. For linear.cpp and
// linear_fp8.cpp.
#pragma once

#include "runtime/autograd/gradient_sink.hpp"
#include "runtime/tensor/expect_operand.hpp"

namespace tessera::autograd {

// x [..., in] as the rows of a matrix, after a look at all operands. `is_rounded`: in 8 bits.
inline Tensor rows_of_linear(const char* name, const Tensor& x, const Tensor& weight,
                             const Tensor& bias, bool is_rounded = false) {
  if (!is_rounded) tessera::detail::expect_computed(name, x.dtype());
  tessera::detail::expect_computed(name, weight.dtype());
  TESSERA_EXPECT(weight.ndim() == 2 && x.ndim() >= 1 && x.size(-1) == weight.size(1) &&
                     (is_rounded || x.dtype() == weight.dtype()),
                 name, ": x is ", x.shape(), " of ", x.dtype(), ", weight is ", weight.shape(),
                 " of ", weight.dtype(), "; expected [..., in] and [out, in] of one dtype");
  tessera::detail::expect_bias(name, bias, weight.size(0), weight.dtype());
  std::int64_t rows = 1;
  for (int d = 0; d + 1 < x.ndim(); ++d) rows *= x.size(d);
  return raw::reshape(x, {rows, x.size(-1)});
}

inline Shape shape_of_linear(const Tensor& x, const Tensor& weight) {
  Shape shape = x.shape();
  shape[x.ndim() - 1] = weight.size(0);
  return shape;
}

inline bool holds_any(const Tensor& /*out*/) { return true; }

// That of the weight, input 1. can_hold: whether the product can be written to a tensor.
template <class Product>
void set_weight(Gradients& out, const Shape& shape, DType dtype, const Device& device,
                Product product, bool (*can_hold)(const Tensor&) = holds_any) {
  if (!out.wants(1)) return;
  const auto sink = out.sink(1);
  if (sink && can_write(*sink, dtype) && can_hold(sink->tensor))
    return product(sink->tensor, sink->scale, beta(*sink));
  const bool is_wider = sink && can_write(*sink, dtype);  // but lies as no product can be written
  const Tensor made = Tensor::empty(shape, is_wider ? sink->tensor.dtype() : dtype, device);
  product(made, 1, 0);
  write_or_set(out, 1, sink, made, dtype);
}

// That of the bias, input 2, from g [N, out].
inline void set_bias(Gradients& out, const Tensor& g) {
  if (!out.wants(2)) return;
  const auto sink = out.sink(2);
  if (sink && can_write(*sink, g.dtype()))
    raw::sum_rows_into(sink->tensor, g, sink->scale,
                       sink->accumulate ? raw::Accumulate::yes : raw::Accumulate::no);
  else
    write_or_set(out, 2, sink, raw::reduce(raw::Reduction::sum, g, 0), g.dtype());
}

// That of x [..., in], input 0, from a product [N, in]. The product itself adds to what is there
// already, so that q, k and v, say, take no kernel beside their products. Where somebody else sees
// that, as the other side of a residual does, it adds to a copy, with the same bits.
template <class Product>
void set_input(Gradients& out, const Shape& shape, const Shape& rows, DType dtype,
               const Device& device, Product product, bool (*can_hold)(const Tensor&) = holds_any) {
  const auto sink = out.sink(0);
  const bool is_direct =
      sink && sink->tensor.is_contiguous() && can_write(*sink, dtype) && can_hold(sink->tensor);
  const Tensor held = out.extract(0);
  const bool in_place = held.defined() && held.is_exclusive() && held.is_contiguous() &&
                        held.dtype() == dtype && can_hold(held);
  const Tensor d = is_direct ? sink->tensor : in_place ? held : Tensor::empty(shape, dtype, device);
  if (held.defined() && !in_place) raw::copy_into(d, held);
  const bool adds = is_direct ? sink->accumulate : held.defined();
  product(raw::reshape(d, rows), is_direct ? sink->scale : 1, adds ? 1 : 0);
  if (!is_direct) write_or_set(out, 0, sink, d, dtype);
}

}  // namespace tessera::autograd
