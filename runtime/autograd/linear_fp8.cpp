// The linear layer with products of 8-bit floats. Forward makes both forms of x and keeps the one
// that backward reads, a byte an element; the weight is rounded anew in backward, where its unit
// has gathered it again.
#include "tessera/autograd/fp8.hpp"

#include "runtime/autograd/kept_results.hpp"
#include "runtime/autograd/linear_layer.hpp"
#include "runtime/autograd/operands.hpp"
#include "runtime/tensor/fp8.hpp"
#include "tessera/autograd/ops.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::Saved;
using detail::Fp8Form;
using detail::Fp8Matrix;
using kernels::Scaling;

struct SharedFp8Input::Rounded {
  Tensor x;  // held, so that nothing else lies there
  std::uint64_t version;
  Fp8Recipe recipe;
  detail::Fp8Forms forms;

  bool is_of(const Tensor& other, Fp8Recipe wanted, bool wants_transposed) const {
    return x.storage() == other.storage() && version == other.storage()->version &&
           x.data() == other.data() && x.shape() == other.shape() &&
           x.strides() == other.strides() && recipe == wanted &&
           (forms.transposed.codes.defined() || !wants_transposed);
  }
};

namespace {

// Where the scope on this thread keeps it; null without one.
std::unique_ptr<SharedFp8Input::Rounded>*& shared_input() noexcept {
  thread_local std::unique_ptr<SharedFp8Input::Rounded>* instance = nullptr;
  return instance;
}

// What the recipe says of x and of gradients, and of weights.
Scaling of_rows(Fp8Recipe recipe) {
  return recipe == Fp8Recipe::tensorwise ? Scaling::tensor : Scaling::rows;
}
Scaling of_weights(Fp8Recipe recipe) {
  return recipe == Fp8Recipe::tensorwise ? Scaling::tensor : Scaling::blocks;
}
DType of_gradients(Fp8Recipe recipe) { return recipe == Fp8Recipe::tensorwise ? e5m2 : e4m3; }

void check_fp8(const Tensor& rows, const Tensor& weight, bool wants_weight) {
  TESSERA_EXPECT(rows.dtype() != f64, "linear_fp8: x is f64; expected f32, bf16 or f16");
  TESSERA_EXPECT(fits_fp8(weight.size(1), weight.size(0)), "linear_fp8: weight is ", weight.shape(),
                 "; 16 must divide both, or let the layer multiply in its own dtype");
  TESSERA_EXPECT(!wants_weight || rows.size(0) % 16 == 0, "linear_fp8: x has ", rows.size(0),
                 " rows, over which the weight's gradient is a sum; choose a batch and a length of "
                 "which 16 divides the product");
}

struct SavedMatrix {
  Saved codes, scales;
  Scaling scaling;

  explicit SavedMatrix(const Fp8Matrix& x) : codes(x.codes), scales(x.scales), scaling(x.scaling) {}
  Fp8Matrix take(bool stays) {
    return {stays ? codes.get() : codes.extract(), stays ? scales.get() : scales.extract(),
            scaling};
  }
};

// Both forms of x, whose rows these are, or the plain one.
detail::Fp8Forms rounded_input(const Tensor& x, const Tensor& rows, Fp8Recipe recipe,
                               bool wants_transposed) {
  auto* const shared = shared_input();
  if (shared && *shared && (*shared)->is_of(x, recipe, wants_transposed)) return (*shared)->forms;
  detail::Fp8Forms forms = detail::quantize(rows, e4m3, of_rows(recipe),
                                            wants_transposed ? Fp8Form::both : Fp8Form::plain);
  if (shared)
    *shared = std::unique_ptr<SharedFp8Input::Rounded>(
        new SharedFp8Input::Rounded{x.detach(), x.storage()->version, recipe, forms});
  return forms;
}

}  // namespace

SharedFp8Input::SharedFp8Input() noexcept : before_(std::exchange(shared_input(), &rounded_)) {}
SharedFp8Input::~SharedFp8Input() { shared_input() = before_; }

Tensor linear_fp8(const Tensor& x, const Tensor& weight, const Tensor& bias, Fp8Recipe recipe,
                  Caller at) {
  const CallSite site("linear_fp8", at);
  autograd::expect_floating(x);
  const Tensor rows = autograd::rows_of_linear("linear_fp8", x, weight, bias);
  const bool wants_weight = autograd::grad_enabled() && weight.requires_grad();
  check_fp8(rows, weight, wants_weight);
  const auto [x_codes, x_transposed] = rounded_input(x, rows, recipe, wants_weight);
  // Saved before the product is launched, as by linear().
  SavedMatrix saved_x(x_transposed);
  Saved saved_weight(weight);
  const Tensor y = autograd::kept_product_or("linear_fp8", rows, weight, [&] {
    Tensor out = Tensor::empty({rows.size(0), weight.size(0)}, rows.dtype(), rows.device());
    detail::multiply_fp8(
        out, x_codes, detail::quantize(weight, e4m3, of_weights(recipe), Fp8Form::plain).plain, 1,
        0, bias.defined() ? raw::contiguous(bias) : bias, recipe == Fp8Recipe::tensorwise);
    return out;
  });
  return autograd::record(
      "linear_fp8", {x, weight, bias}, raw::reshape(y, autograd::shape_of_linear(x, weight)),
      [saved_x = std::move(saved_x), saved_weight = std::move(saved_weight), shape = x.shape(),
       count = rows.size(0), recipe](const Tensor& gradient, Gradients& out) mutable {
        const Tensor& w = saved_weight.get();
        const Tensor g = raw::contiguous(raw::reshape(gradient, {count, w.size(0)}));
        auto [dy, dy_transposed] = detail::quantize(g, of_gradients(recipe), of_rows(recipe),
                                                    !out.wants(1)  ? Fp8Form::plain
                                                    : out.wants(0) ? Fp8Form::both
                                                                   : Fp8Form::transposed);
        if (out.wants(1)) {
          const Fp8Matrix x_rows = saved_x.take(out.graph_is_retained());
          autograd::set_weight(
              out, w.shape(), g.dtype(), g.device(),
              [&](const Tensor& d, double alpha, double beta) {
                detail::multiply_fp8(d, dy_transposed, x_rows, alpha, beta, {}, false);
              },
              detail::can_hold_product);
          dy_transposed = {};
        }
        autograd::set_bias(out, g);
        if (!out.wants(0)) return;
        const Fp8Matrix columns =
            detail::quantize(w, e4m3, of_weights(recipe), Fp8Form::transposed).transposed;
        autograd::set_input(
            out, shape, {count, w.size(1)}, g.dtype(), g.device(),
            [&](const Tensor& d, double alpha, double beta) {
              detail::multiply_fp8(d, dy, columns, alpha, beta, {}, false);
            },
            detail::can_hold_product);
      });
}

}  // namespace tessera
