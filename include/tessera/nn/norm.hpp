// Normalisation over the last dimension; statistics in f32 for 16-bit inputs.
#pragma once

#include <utility>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/module.hpp"

namespace tessera {

// Hooks see both tensors.
template <class F>
void for_each_tensor(SumAndNorm& x, const F& f) {
  f(x.sum);
  f(x.norm);
}

}  // namespace tessera

namespace tessera::nn {

struct NormOptions {
  double eps = 1e-5;
  // Whether there are weight and bias. Diffusion transformers go without.
  bool elementwise_affine = true;
  bool bias = true;  // LayerNorm's; RMSNorm has none
};

// The full tensor; undefined for an undefined parameter.
inline Tensor value_if_any(const Parameter& p) { return p.defined() ? p.value() : Tensor(); }

// x weight / sqrt(mean(x^2) + eps).
// Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
class RMSNorm : public Module {
 public:
  explicit RMSNorm(std::int64_t dim, double eps = 1e-5, const Device& device = Device::meta())
      : RMSNorm(dim, NormOptions{.eps = eps}, device) {}
  RMSNorm(std::int64_t dim, const NormOptions& options, const Device& device = Device::meta())
      : eps_(options.eps) {
    TESSERA_EXPECT(dim > 0 && eps_ >= 0, "RMSNorm: dim ", dim, " and eps ", eps_,
                   "; expected at least 1 and at least 0");
    if (options.elementwise_affine) weight = Parameter({dim}, Initializer::constant(1));
    register_parameter("weight", weight);
    if (!device.is_meta()) materialize(device);
  }
  // x [..., dim] -> the same shape. `form` is the one that its only readers take. It is ignored if
  // somebody else looks at what this layer returns.
  Tensor operator()(const Tensor& x, InputForm form = {}, Caller at = Caller::current()) {
    if (is_hooked()) form = {};
    const CallSite site(at);
    return call([&](const Tensor& in) { return rms_norm(in, value_if_any(weight), eps_, form); },
                x);
  }
  // The sum of x and residual, [..., dim] each, and the norm of the sum.
  SumAndNorm of_sum(const Tensor& x, Tensor residual, InputForm form = {},
                    Caller at = Caller::current()) {
    if (is_hooked()) form = {};
    const CallSite site(at);
    return call(
        [&] { return add_rms_norm(x, std::move(residual), value_if_any(weight), eps_, form); });
  }

  Parameter weight;  // [dim], starts as 1; undefined without elementwise_affine

 private:
  double eps_;
};

// (x - mean) weight / sqrt(variance + eps) + bias.
// Source: Ba, Kiros and Hinton, "Layer normalization", 2016.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(std::int64_t dim, double eps = 1e-5, const Device& device = Device::meta())
      : LayerNorm(dim, NormOptions{.eps = eps}, device) {}
  LayerNorm(std::int64_t dim, const NormOptions& options, const Device& device = Device::meta())
      : eps_(options.eps) {
    TESSERA_EXPECT(dim > 0 && eps_ >= 0, "LayerNorm: dim ", dim, " and eps ", eps_,
                   "; expected at least 1 and at least 0");
    if (options.elementwise_affine) weight = Parameter({dim}, Initializer::constant(1));
    if (options.elementwise_affine && options.bias)
      bias = Parameter({dim}, Initializer::constant(0));
    register_parameter("weight", weight);
    register_parameter("bias", bias);
    if (!device.is_meta()) materialize(device);
  }
  // Both as RMSNorm's.
  Tensor operator()(const Tensor& x, InputForm form = {}, Caller at = Caller::current()) {
    if (is_hooked()) form = {};
    const CallSite site(at);
    return call(
        [&](const Tensor& in) {
          return layer_norm(in, value_if_any(weight), value_if_any(bias), eps_, form);
        },
        x);
  }
  SumAndNorm of_sum(const Tensor& x, Tensor residual, InputForm form = {},
                    Caller at = Caller::current()) {
    if (is_hooked()) form = {};
    const CallSite site(at);
    return call([&] {
      return add_layer_norm(x, std::move(residual), value_if_any(weight), value_if_any(bias), eps_,
                            form);
    });
  }

  Parameter weight, bias;  // [dim], start as 1 and 0; undefined without

 private:
  double eps_;
};

}  // namespace tessera::nn
