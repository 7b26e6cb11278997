// Normalisation over the last dimension; statistics in f32 for 16-bit inputs.
#pragma once

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

// x weight / sqrt(mean(x^2) + eps).
// Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
class RMSNorm : public Module {
 public:
  explicit RMSNorm(std::int64_t dim, double eps = 1e-5, const Device& device = Device::meta());
  // x [..., dim] -> the same shape. `rounded`: in 8 bits, where nobody looks at what this layer
  // gives but the layers that have been asked for it (Linear::takes_rounded).
  Tensor operator()(const Tensor& x, std::optional<Fp8Recipe> rounded = {},
                    Caller at = Caller::current());
  // The sum of both, [..., dim] each, and its norm.
  SumAndNorm of_sum(const Tensor& x, Tensor residual, std::optional<Fp8Recipe> rounded = {},
                    Caller at = Caller::current());

  Parameter weight;  // [dim], 1

 private:
  double eps_;
};

// (x - mean) weight / sqrt(variance + eps) + bias.
// Source: Ba, Kiros and Hinton, "Layer normalization", 2016.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(std::int64_t dim, double eps = 1e-5, const Device& device = Device::meta());
  // As of RMSNorm.
  Tensor operator()(const Tensor& x, std::optional<Fp8Recipe> rounded = {},
                    Caller at = Caller::current());
  SumAndNorm of_sum(const Tensor& x, Tensor residual, std::optional<Fp8Recipe> rounded = {},
                    Caller at = Caller::current());

  Parameter weight, bias;  // [dim], 1 and 0

 private:
  double eps_;
};

}  // namespace tessera::nn
