// The linear layer's function, alone and after GELU, and its derivatives. The weight's gradient
// goes straight to the parameter's gradient sink.
#include "runtime/autograd/operands.hpp"
#include "tessera/autograd/ops.hpp"

#include "runtime/autograd/kept_results.hpp"
#include "runtime/autograd/linear_layer.hpp"
#include "runtime/tensor/launch.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::record;
using autograd::rows_of_linear;
using autograd::Saved;
using autograd::shape_of_linear;
using raw::Transpose;

namespace {

// The gradients of weight and bias, from g [N, out] and rows [N, in]. They come before the input's,
// which may then lie where the rows did.
void set_parameters(Gradients& out, const Tensor& g, Saved& saved_rows) {
  const Tensor rows = out.graph_is_retained() ? saved_rows.get() : saved_rows.extract();
  autograd::set_weight(out, {g.size(1), rows.size(1)}, g.dtype(), g.device(),
                       [&](const Tensor& d, double alpha, double beta) {
                         raw::matmul_into(d, g, rows, Transpose::yes, Transpose::no, alpha, beta);
                       });
  autograd::set_bias(out, g);
}

// The gradient of x [..., in], from g [N, out].
void set_input(Gradients& out, const Tensor& g, const Tensor& weight, const Shape& shape) {
  autograd::set_input(out, shape, {g.size(0), weight.size(1)}, g.dtype(), g.device(),
                      [&](const Tensor& d, double alpha, double beta) {
                        raw::matmul_into(d, g, weight, Transpose::no, Transpose::no, alpha, beta);
                      });
}

// What y = x W^T + bias is differentiated with. Saved before the product is launched: the last one
// of a recomputed function is then not made again.
struct SavedOperands {
  SavedOperands(const Tensor& r, const Tensor& w) : rows(r), weight(w) {}
  Saved rows, weight;  // [N, in], [out, in]
};

// rows W^T + bias + residual, where there is one: [N, out].
Tensor product(const Tensor& rows, const Tensor& weight, const Tensor& bias,
               const Tensor& residual = {}) {
  return autograd::kept_product_or("linear", rows, weight, [&] {
    Tensor y = Tensor::empty({rows.size(0), weight.size(0)}, rows.dtype(), rows.device());
    const Tensor added =
        residual.defined() ? raw::reshape(raw::contiguous(residual), y.shape()) : Tensor();
    raw::matmul_into(y, rows, weight, Transpose::no, Transpose::yes, 1, added.defined() ? 1 : 0,
                     bias, added);
    return y;
  });
}

// The history of a product; the residual's gradient is that of the sum.
Tensor record_product(const char* name, const std::array<Tensor, 4>& inputs, const Tensor& y,
                      autograd::Backward backward) {
  if (!inputs[3].defined()) return record(name, std::span(inputs).first(3), y, std::move(backward));
  return record(name, inputs, y,
                [of_product = std::move(backward)](const Tensor& g, Gradients& out) mutable {
                  of_product(g, out);
                  if (out.wants(3)) out.set(3, g);
                });
}

// y is differentiated alike whatever x has been through.
Tensor record_linear(const char* name, const Tensor& x, SavedOperands saved, const Tensor& weight,
                     const Tensor& bias, const Tensor& residual, const Tensor& y) {
  return record_product(name, {x, weight, bias, residual}, y,
                        [rows = std::move(saved.rows), weight = std::move(saved.weight),
                         shape = x.shape()](const Tensor& gradient, Gradients& out) mutable {
                          const Tensor g =
                              raw::reshape(gradient, {rows.get().size(0), weight.get().size(0)});
                          set_parameters(out, g, rows);
                          if (out.wants(0)) set_input(out, g, weight.get(), shape);
                        });
}

// residual + linear(x); without residual linear(x).
Tensor linear_of(const char* name, const Tensor& residual, const Tensor& x, const Tensor& weight,
                 const Tensor& bias) {
  autograd::expect_floating(x);
  const Tensor rows = rows_of_linear(name, x, weight, bias);
  SavedOperands saved(rows, weight);
  return record_linear(
      name, x, std::move(saved), weight, bias, residual,
      raw::reshape(product(rows, weight, bias, residual), shape_of_linear(x, weight)));
}

Tensor linear_of(const char* name, const Tensor& residual, const Activated& x, const Tensor& weight,
                 const Tensor& bias) {
  autograd::expect_floating(x.value);
  const Tensor rows = rows_of_linear(name, x.value, weight, bias);
  SavedOperands saved(rows, weight);
  Saved saved_before(x.before);
  return record_product(
      name, {x.before, weight, bias, residual},
      raw::reshape(product(rows, weight, bias, residual), shape_of_linear(x.value, weight)),
      [rows = std::move(saved.rows), before = std::move(saved_before),
       weight = std::move(saved.weight)](const Tensor& gradient, Gradients& out) mutable {
        const Shape shape = rows.get().shape();
        const Tensor g = raw::reshape(gradient, {shape[0], weight.get().size(0)});
        set_parameters(out, g, rows);
        if (out.wants(0)) {
          Tensor d = Tensor::empty(shape, g.dtype(), g.device());
          raw::matmul_gelu_backward_into(d, raw::reshape(before.get(), d.shape()), g, weight.get(),
                                         Transpose::no, Transpose::no);
          out.set(0, raw::reshape(d, before.get().shape()));
        }
      });
}

template <class X>
Tensor add_linear_of(const Tensor& residual, const X& x, const Tensor& value, const Tensor& weight,
                     const Tensor& bias) {
  constexpr const char* kName = "add_linear";
  rows_of_linear(kName, value, weight, bias);  // looks at them first
  TESSERA_EXPECT(
      residual.shape() == shape_of_linear(value, weight) && residual.dtype() == value.dtype(),
      kName, ": the residual is ", residual.shape(), " of ", residual.dtype(),
      ", what is added to it ", shape_of_linear(value, weight), " of ", value.dtype(),
      "; expected the same");
  tessera::detail::common_device(kName, value, residual);
  return linear_of(kName, residual, x, weight, bias);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Caller at) {
  const CallSite site("linear", at);
  return linear_of("linear", {}, x, weight, bias);
}
Tensor linear(const Activated& x, const Tensor& weight, const Tensor& bias, Caller at) {
  const CallSite site("linear", at);
  return linear_of("linear", {}, x, weight, bias);
}

Tensor add_linear(const Tensor& residual, const Tensor& x, const Tensor& weight, const Tensor& bias,
                  Caller at) {
  const CallSite site("add_linear", at);
  return add_linear_of(residual, x, x, weight, bias);
}
Tensor add_linear(const Tensor& residual, const Activated& x, const Tensor& weight,
                  const Tensor& bias, Caller at) {
  const CallSite site("add_linear", at);
  return add_linear_of(residual, x, x.value, weight, bias);
}

Activated linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Caller at) {
  const CallSite site("linear_gelu", at);
  autograd::expect_floating(x);
  const Tensor rows = rows_of_linear("linear_gelu", x, weight, bias);
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
  return {record_linear("linear", x, {rows, weight}, weight, bias, {}, raw::reshape(before, shape)),
          raw::reshape(value, shape)};
}

}  // namespace tessera
