// The linear layer's function, alone and after GELU, and its derivatives. The weight's gradient
// goes straight to the parameter's gradient sink.
#include "runtime/autograd/operands.hpp"
#include "runtime/tensor/computed.hpp"
#include "tessera/autograd/ops.hpp"

#include "runtime/autograd/gradient_sink.hpp"
#include "runtime/autograd/kept_results.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::record;
using autograd::Saved;
using raw::Transpose;

namespace {

// The gradients of weight and bias, from g [N, out] and rows [N, in]; the weight's is written
// straight to its sink where that is possible. They come before the input's, which may then lie
// where the rows did.
void set_parameters(Gradients& out, const Tensor& g, Saved& saved_rows) {
  const Tensor rows = out.graph_is_retained() ? saved_rows.get() : saved_rows.extract();
  if (out.wants(1)) {
    const auto sink = out.sink(1);
    if (sink && can_write(*sink, g.dtype()))
      raw::matmul_into(sink->tensor, g, rows, Transpose::yes, Transpose::no, sink->scale,
                       beta(*sink));
    else
      write_or_set(out, 1, sink, raw::matmul(g, rows, Transpose::yes, Transpose::no), g.dtype());
  }
  if (!out.wants(2)) return;
  const auto sink = out.sink(2);
  if (sink && can_write(*sink, g.dtype()))
    raw::sum_rows_into(sink->tensor, g, sink->scale,
                       sink->accumulate ? raw::Accumulate::yes : raw::Accumulate::no);
  else
    write_or_set(out, 2, sink, raw::reduce(raw::Reduction::sum, g, 0), g.dtype());
}

// The gradient of x [..., in], from g [N, out]. The product itself adds to what is there already,
// so that q, k and v, say, take no kernel beside their products. Where somebody else sees that, as
// the other side of a residual does, it adds to a copy, with the same bits.
void set_input(Gradients& out, const Tensor& g, const Tensor& weight, const Shape& shape) {
  const auto sink = out.sink(0);
  const bool is_direct = sink && sink->tensor.is_contiguous() && can_write(*sink, g.dtype());
  const Tensor held = out.extract(0);
  const bool in_place = held.defined() && held.is_exclusive() && held.is_contiguous();
  const Tensor d = is_direct  ? sink->tensor
                   : in_place ? held
                              : Tensor::empty(shape, g.dtype(), g.device());
  if (held.defined() && !in_place) raw::copy_into(d, held);
  const bool adds = is_direct ? sink->accumulate : held.defined();
  raw::matmul_into(raw::reshape(d, {g.size(0), weight.size(1)}), g, weight, Transpose::no,
                   Transpose::no, is_direct ? sink->scale : 1, adds ? 1 : 0);
  if (!is_direct) write_or_set(out, 0, sink, d, g.dtype());
}

// x [..., in] as the rows of a matrix, after a look at all operands.
Tensor rows_of_linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  for (const Tensor* operand : {&x, &weight}) detail::expect_computed("linear", operand->dtype());
  TESSERA_EXPECT(weight.ndim() == 2 && x.ndim() >= 1 && x.size(-1) == weight.size(1) &&
                     x.dtype() == weight.dtype(),
                 "linear: x is ", x.shape(), " of ", x.dtype(), ", weight is ", weight.shape(),
                 " of ", weight.dtype(), "; expected [..., in] and [out, in] of one dtype");
  TESSERA_EXPECT(!bias.defined() || (bias.ndim() == 1 && bias.size(0) == weight.size(0)),
                 "linear: bias is ", bias.shape(), ", expected [", weight.size(0), "]");
  std::int64_t rows = 1;
  for (int d = 0; d + 1 < x.ndim(); ++d) rows *= x.size(d);
  return raw::reshape(x, {rows, x.size(-1)});
}

Shape shape_of_linear(const Tensor& x, const Tensor& weight) {
  Shape shape = x.shape();
  shape[x.ndim() - 1] = weight.size(0);
  return shape;
}

// What y = x W^T + bias is differentiated with. Saved before the product is launched: the last one
// of a recomputed function is then not made again.
struct SavedOperands {
  SavedOperands(const Tensor& r, const Tensor& w) : rows(r), weight(w) {}
  Saved rows, weight;  // [N, in], [out, in]
};

// rows W^T + bias: [N, out].
Tensor product(const Tensor& rows, const Tensor& weight, const Tensor& bias) {
  return autograd::kept_product_or("linear", rows, weight, [&] {
    Tensor y = Tensor::empty({rows.size(0), weight.size(0)}, rows.dtype(), rows.device());
    raw::matmul_into(y, rows, weight, Transpose::no, Transpose::yes, 1, 0, bias);
    return y;
  });
}

// y is differentiated alike whatever x has been through.
Tensor record_linear(const Tensor& x, SavedOperands saved, const Tensor& weight, const Tensor& bias,
                     const Tensor& y) {
  return record("linear", {x, weight, bias}, y,
                [rows = std::move(saved.rows), weight = std::move(saved.weight), shape = x.shape()](
                    const Tensor& gradient, Gradients& out) mutable {
                  const Tensor g =
                      raw::reshape(gradient, {rows.get().size(0), weight.get().size(0)});
                  set_parameters(out, g, rows);
                  if (out.wants(0)) set_input(out, g, weight.get(), shape);
                });
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Caller at) {
  const CallSite site("linear", at);
  autograd::expect_floating(x);
  const Tensor rows = rows_of_linear(x, weight, bias);
  SavedOperands saved(rows, weight);
  return record_linear(x, std::move(saved), weight, bias,
                       raw::reshape(product(rows, weight, bias), shape_of_linear(x, weight)));
}

Activated linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Caller at) {
  const CallSite site("linear_gelu", at);
  autograd::expect_floating(x);
  const Tensor rows = rows_of_linear(x, weight, bias);
  Tensor before, value;
  if (const auto* kept = autograd::KeptResults::current();
      kept && kept->keeps(autograd::Expensive::product)) {
    before = product(rows, weight, bias);
    value = raw::gelu(before);  // in both runs, whose bits are then the same on a GPU, too
  } else {
    before = Tensor::empty({rows.size(0), weight.size(0)}, x.dtype(), x.device());
    value = Tensor::empty(before.shape(), x.dtype(), x.device());
    raw::matmul_gelu_into(value, before, rows, weight, Transpose::no, Transpose::yes, bias);
  }
  const Shape shape = shape_of_linear(x, weight);
  return {record_linear(x, {rows, weight}, weight, bias, raw::reshape(before, shape)),
          raw::reshape(value, shape)};
}

Tensor linear(const Activated& x, const Tensor& weight, const Tensor& bias, Caller at) {
  const CallSite site("linear", at);
  autograd::expect_floating(x.value);
  const Tensor rows = rows_of_linear(x.value, weight, bias);
  SavedOperands saved(rows, weight);
  Saved saved_before(x.before);
  return record("linear", {x.before, weight, bias},
                raw::reshape(product(rows, weight, bias), shape_of_linear(x.value, weight)),
                [rows = std::move(saved.rows), before = std::move(saved_before),
                 weight = std::move(saved.weight)](const Tensor& gradient, Gradients& out) mutable {
                  const Shape shape = rows.get().shape();
                  const Tensor g = raw::reshape(gradient, {shape[0], weight.get().size(0)});
                  set_parameters(out, g, rows);
                  if (out.wants(0)) {
                    Tensor d = Tensor::empty(shape, g.dtype(), g.device());
                    raw::matmul_gelu_backward_into(d, raw::reshape(before.get(), d.shape()), g,
                                                   weight.get(), Transpose::no, Transpose::no);
                    out.set(0, raw::reshape(d, before.get().shape()));
                  }
                });
}

}  // namespace tessera
