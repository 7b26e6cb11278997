// The linear layer with products of 8-bit floats. Forward makes both forms of x and keeps the one
// that backward reads, a byte an element; the weight is rounded anew in backward, where its unit
// has gathered it again.
#include "tessera/autograd/fp8.hpp"

#include "runtime/autograd/fp8_input.hpp"
#include "runtime/autograd/kept_results.hpp"
#include "runtime/autograd/linear_layer.hpp"
#include "runtime/autograd/operands.hpp"
#include "runtime/tensor/fp8.hpp"
#include "tessera/autograd/ops.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::Saved;
using autograd::scaling_of_rows;
using detail::Fp8Form;
using detail::Fp8Matrix;
using kernels::Scaling;

struct SharedFp8Input::Rounded {
  Tensor x;  // or its codes; held, so that nothing else lies there
  std::uint64_t version;
  DType dtype;  // before it was rounded
  Fp8Recipe recipe;
  detail::Fp8Forms forms;

  bool is_of(const Tensor& other) const {
    return x.storage() == other.storage() && version == other.storage()->version &&
           x.data() == other.data() && x.shape() == other.shape() && x.strides() == other.strides();
  }
  bool serves(Fp8Recipe wanted, bool wants_transposed) const {
    return recipe == wanted && (forms.transposed.codes.defined() || !wants_transposed);
  }
};

namespace {

SharedFp8Input*& innermost_input() noexcept {
  thread_local SharedFp8Input* instance = nullptr;
  return instance;
}

Scaling of_weights(Fp8Recipe recipe) {
  return recipe == Fp8Recipe::tensorwise ? Scaling::tensor : Scaling::blocks;
}
DType of_gradients(Fp8Recipe recipe) { return recipe == Fp8Recipe::tensorwise ? e5m2 : e4m3; }

bool fits_rows(std::int64_t rows) { return rows % 16 == 0; }
void check_fp8(const Tensor& rows, const Tensor& weight, bool wants_weight) {
  TESSERA_EXPECT(weight.dtype() != f64, "linear_fp8: weight is f64; expected f32, bf16 or f16");
  TESSERA_EXPECT(fits_fp8(weight.size(1), weight.size(0)), "linear_fp8: weight is ", weight.shape(),
                 "; 16 must divide both, or let the layer multiply in its own dtype");
  TESSERA_EXPECT(!wants_weight || fits_rows(rows.size(0)), "linear_fp8: x has ", rows.size(0),
                 " rows, and the weight's gradient needs a multiple of 16; choose batch and length "
                 "so that 16 divides their product");
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

bool is_rounded(const Tensor& x) { return x.storage()->are_codes; }

}  // namespace

// Keeps what was rounded last, and finds it again, in the scope or in one around it.
class detail::SharedFp8 {
 public:
  static void keep(const Tensor& x, DType dtype, Fp8Recipe recipe, const detail::Fp8Forms& forms) {
    if (SharedFp8Input* const scope = innermost_input())
      scope->rounded_.reset(
          new SharedFp8Input::Rounded{x.detach(), x.storage()->version, dtype, recipe, forms});
  }
  static const SharedFp8Input::Rounded* find(const Tensor& x) {
    for (const SharedFp8Input* scope = innermost_input(); scope; scope = scope->around_)
      if (scope->rounded_ && scope->rounded_->is_of(x)) return scope->rounded_.get();
    return nullptr;
  }
};

namespace {

using detail::SharedFp8;

// Both forms of x, whose rows these are, or the plain one.
detail::Fp8Forms forms_of(const Tensor& x, const Tensor& rows, DType dtype, Fp8Recipe recipe,
                          bool wants_transposed) {
  const auto* const known = SharedFp8::find(x);
  TESSERA_EXPECT(
      !is_rounded(x) || (known && known->recipe == recipe), "linear_fp8: x is in 8 bits, ",
      known ? "of another recipe"
            : "but its scales are lost: no SharedFp8Input around has x itself as the last tensor "
              "that it rounded",
      "; give the layer that makes x this recipe, and other layers a scope of their own");
  TESSERA_EXPECT(!is_rounded(x) || known->dtype == dtype, "linear_fp8: x was rounded from ",
                 known ? known->dtype : dtype, ", weight is of ", dtype, "; expected one dtype");
  if (known && known->serves(recipe, wants_transposed)) return known->forms;
  TESSERA_EXPECT(!is_rounded(x),
                 "linear_fp8: x was rounded to 8 bits without gradients, but the weight needs one; "
                 "round x with gradients on");
  const detail::Fp8Forms forms = detail::quantize(
      rows, e4m3, scaling_of_rows(recipe), wants_transposed ? Fp8Form::both : Fp8Form::plain);
  SharedFp8::keep(x, dtype, recipe, forms);
  return forms;
}

// Where rows cannot be along a sum, there is no weight's gradient, as linear_fp8 will say.
template <class Source>
Tensor keep_rounded(const Source& x, const Shape& shape, DType dtype, Fp8Recipe recipe) {
  const std::int64_t rows = shape.back() == 0 ? 0 : shape.numel() / shape.back();
  const bool both = autograd::grad_enabled() && fits_rows(rows);
  const detail::Fp8Forms forms =
      detail::quantize(x, scaling_of_rows(recipe), both ? Fp8Form::both : Fp8Form::plain);
  forms.plain.codes.storage()->are_codes = true;
  const Tensor codes = raw::reshape(forms.plain.codes, shape);
  SharedFp8::keep(codes, dtype, recipe, forms);
  return codes;
}

}  // namespace

void autograd::expect_rounded(const char* name, const Tensor& like) {
  TESSERA_EXPECT(innermost_input() != nullptr, name,
                 ": no SharedFp8Input is around the call; make one around it and the calls of "
                 "linear_fp8 that read its result");
  TESSERA_EXPECT((like.dtype() == f32 || like.dtype() == bf16 || like.dtype() == f16) &&
                     like.ndim() > 0 && like.size(-1) % 16 == 0,
                 name, ": x is ", like.shape(), " of ", like.dtype(),
                 "; expected f32, bf16 or f16, of a width that 16 divides");
}
Tensor autograd::rounded_input(const detail::NormOf& x, const Shape& shape, Fp8Recipe recipe) {
  return keep_rounded(x, shape, x.x.dtype(), recipe);
}
Tensor autograd::rounded_input(const detail::SwigluOf& x, const Shape& shape, Fp8Recipe recipe) {
  return keep_rounded(x, shape, x.gate.dtype(), recipe);
}

SharedFp8Input::SharedFp8Input() noexcept : around_(std::exchange(innermost_input(), this)) {}
SharedFp8Input::~SharedFp8Input() {
  SharedFp8Input** at = &innermost_input();
  while (*at && *at != this) at = &(*at)->around_;
  if (*at) *at = around_;
}

Tensor linear_fp8(const Tensor& x, const Tensor& weight, const Tensor& bias, Fp8Recipe recipe,
                  Caller at) {
  const CallSite site("linear_fp8", at);
  autograd::expect_floating(x);
  const Tensor rows = autograd::rows_of_linear("linear_fp8", x, weight, bias, is_rounded(x));
  const bool wants_weight = autograd::grad_enabled() && weight.requires_grad();
  check_fp8(rows, weight, wants_weight);
  const auto [x_codes, x_transposed] = forms_of(x, rows, weight.dtype(), recipe, wants_weight);
  // Saved before the product is launched, as by linear().
  SavedMatrix saved_x(wants_weight ? x_transposed : Fp8Matrix());
  Saved saved_weight(weight);
  const Tensor y = autograd::kept_product_or("linear_fp8", x_codes.codes, weight, [&] {
    Tensor out = Tensor::empty({rows.size(0), weight.size(0)}, weight.dtype(), rows.device());
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
        auto [dy, dy_transposed] =
            detail::quantize(g, of_gradients(recipe), scaling_of_rows(recipe),
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
