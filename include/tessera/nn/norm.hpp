// Normalisation over the last dimension; statistics in f32 for 16-bit inputs.
#pragma once

#include <utility>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/module.hpp"

namespace tessera {

// So that hooks see both.
template <class F>
void for_each_tensor(SumAndNorm& x, const F& f) {
  f(x.sum);
  f(x.norm);
}

}  // namespace tessera

namespace tessera::nn {

struct NormOptions {
  double eps = 1e-5;
  // Without it there is neither weight nor bias, as in diffusion transformers.
  bool elementwise_affine = true;
  bool bias = true;  // of LayerNorm
};

// The full tensor, undefined where the layer goes without.
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
  // x [..., dim] -> the same shape; in the form that its only readers take, where they have one and
  // nobody else looks at what this layer gives.
  Tensor operator()(const Tensor& x, InputForm form = {}, Caller at = Caller::current()) {
    if (is_hooked()) form = {};
    const CallSite site(at);
    return call([&](const Tensor& in) { return rms_norm(in, value_if_any(weight), eps_, form); },
                x);
  }
  // The sum of both, [..., dim] each, and its norm.
  SumAndNorm of_sum(const Tensor& x, Tensor residual, InputForm form = {},
                    Caller at = Caller::current()) {
    if (is_hooked()) form = {};
    const CallSite site(at);
    return call(
        [&] { return add_rms_norm(x, std::move(residual), value_if_any(weight), eps_, form); });
  }

  Parameter weight;  // [dim], 1; undefined without

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
  // As of RMSNorm.
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

  Parameter weight, bias;  // [dim], 1 and 0; undefined without

 private:
  double eps_;
};

}  // namespace tessera::nn
