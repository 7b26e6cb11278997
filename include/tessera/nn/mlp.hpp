// The two position-wise networks of transformers.
#pragma once

#include "tessera/nn/linear.hpp"

namespace tessera::nn {

// down_proj(silu(gate_proj(x)) * up_proj(x)), without biases; fused, gate_up_proj makes both in one
// product, and files hold it as gate_proj and up_proj.
// Source: Shazeer, "GLU variants improve transformer", 2020.
class SwigluMlp : public Module {
 public:
  SwigluMlp(std::int64_t dim, std::int64_t hidden, const Device& device = Device::meta());
  SwigluMlp(std::int64_t dim, std::int64_t hidden, Projections projections,
            const Device& device = Device::meta());
  // x [..., dim] -> [..., dim].
  Tensor operator()(const Tensor& x, Caller at = Caller::current());
  // residual [..., dim] + this of x; see Linear::add_to.
  Tensor add_to(const Tensor& residual, const Tensor& x, Caller at = Caller::current());
  // As Linear::takes_rounded.
  std::optional<Fp8Recipe> takes_rounded() const;

  Linear gate_proj, up_proj;  // without parameters where they are fused
  Linear gate_up_proj;        // without parameters where they are not
  Linear down_proj;

 private:
  bool is_fused() const { return gate_up_proj.weight.defined(); }
  Tensor gated(const Tensor& x);
};

// c_proj(gelu(c_fc(x))), with biases; the tanh form of GELU, as GPT-2 has it.
// Source: Hendrycks and Gimpel, "Gaussian error linear units", 2016.
class GeluMlp : public Module {
 public:
  GeluMlp(std::int64_t dim, std::int64_t hidden, const Device& device = Device::meta());
  // x [..., dim] -> [..., dim].
  Tensor operator()(const Tensor& x, Caller at = Caller::current());
  // residual [..., dim] + this of x; see Linear::add_to.
  Tensor add_to(const Tensor& residual, const Tensor& x, Caller at = Caller::current());
  // As Linear::takes_rounded.
  std::optional<Fp8Recipe> takes_rounded() const;

  Linear c_fc, c_proj;
};

}  // namespace tessera::nn
