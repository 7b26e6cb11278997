// The product of a linear layer, and the work of its neighbours that is done within it.
//
//   norm, SwiGLU ─ x                 written as the product reads it: input_form
//   x W^T + b                        in the weight's dtype; in 8-bit floats; slice by slice; of a
//                                    weight that is stored in 8 bits
//   x W^T + b ─ GELU ─ the next x    gelu
//   residual + x W^T + b             add_to
//   x W^T + b ─ cross-entropy        cross_entropy, of as many columns and rows as fit
//
// Blocks and models hand these on and look into none of them. A linear layer of your own has a
// product as nn::Linear has one. It is then used as nn::Linear is.
#pragma once

#include <optional>

#include "tessera/autograd/fp8.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/nn/module.hpp"

namespace tessera {

// Hooks see both tensors.
template <class F>
void for_each_tensor(Activated& x, const F& f) {
  f(x.before);
  f(x.value);
}

}  // namespace tessera

namespace tessera::nn {

// Within this scope, on this thread, products that read one input make its form once.
using SharedInput = SharedFp8Input;

// Whether projections that read one input have a parameter each, or one that stacks their rows. For
// example those to queries, keys and values. Fused, there are fewer and wider products, forward and
// backward. Files and initial values stay the same. The names of parameters and state dicts change,
// and parts can't be frozen alone. See param/row_parts.hpp.
enum class Projections : std::uint8_t { separate, fused };

class Product {
 public:
  // The product of `layer`, which has registered weight [out, in] and bias [out]; bias is undefined
  // for none. A weight that is stored in 8 bits has `scales` [out, 1]. All stay where they are.
  Product(Module& layer, const Parameter& weight, const Parameter& bias) noexcept
      : Product(layer, weight, bias, kNone) {}
  Product(Module& layer, const Parameter& weight, const Parameter& bias,
          const Parameter& scales) noexcept
      : layer_(layer), weight_(weight), bias_(bias), scales_(scales) {}
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  // --- calls of the layer ---
  // x [..., in] of the weight's dtype -> x W^T + b: [..., out].
  Tensor operator()(const Tensor& x, Caller at = Caller::current());
  // The same product and its GELU, in one pass, for the layer that follows.
  Activated gelu(const Tensor& x, Caller at = Caller::current());
  Tensor operator()(const Activated& x, Caller at = Caller::current());
  // residual [..., out] + the layer of x, which broadcasts as `+` does. It is added within the
  // product if the layer has one product, shapes are equal and nobody looks at the layer's own
  // result.
  Tensor add_to(const Tensor& residual, const Tensor& x, Caller at = Caller::current());
  Tensor add_to(const Tensor& residual, const Activated& x, Caller at = Caller::current());
  // The mean cross-entropy of the layer's outputs with targets [N], in nats: []. It holds at most
  // `most_logits` outputs at a time, or 256 columns of one row. They are made once more in
  // backward. With `order.gradient` they are made once (see linear_cross_entropy); if the weight
  // has several slices, all of them are kept.
  Tensor cross_entropy(const Tensor& x, const Tensor& targets, std::int64_t most_logits,
                       const LossOrder& order = {}, Caller at = Caller::current());

  // The form in which the layer before may write what this one reads, and write nothing else (see
  // SharedInput). It is plain values where somebody looks at this layer's input. It is so, too,
  // where the weight is frozen, because that needs one form of the input only. It knows nothing of
  // modules around the layer, so they ask is_hooked() of themselves, too.
  InputForm input_form() const;

  // Makes products in 8-bit floats from the next call on, or no longer. For all layers of a model:
  // nn/fp8.hpp. Throws: ContractError for a weight that is streamed or stored in 8 bits, and for
  // sizes that 16 does not divide.
  void set_fp8(std::optional<Fp8Recipe> recipe);
  const std::optional<Fp8Recipe>& fp8() const noexcept { return fp8_; }

  const Parameter& weight() const noexcept { return weight_; }

 private:
  static const Parameter kNone;

  bool is_in_8_bits() const { return scales_.defined(); }
  bool is_plain() const { return !fp8_ && !is_in_8_bits(); }  // one product in the weight's dtype
  Tensor multiply(const Tensor& x) const;
  Tensor scales() const { return scales_.defined() ? scales_.value() : Tensor(); }
  Tensor bias() const { return bias_.defined() ? bias_.value() : Tensor(); }
  bool adds_to(const Tensor& residual, const Tensor& x) const;

  Module& layer_;
  const Parameter& weight_;
  const Parameter& bias_;
  const Parameter& scales_;
  std::optional<Fp8Recipe> fp8_;
};

// The form that all of them take; plain values if they differ.
template <class... Products>
InputForm common_form(const Product& first, const Products&... others) {
  const InputForm form = first.input_form();
  return ((others.input_form() == form) && ...) ? form : InputForm();
}

}  // namespace tessera::nn
