// The two position-wise networks of transformers.
#pragma once

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/linear.hpp"

namespace tessera::nn {

// down_proj(silu(gate_proj(x)) * up_proj(x)), without biases. Fused, gate_up_proj makes gate and up
// in one product, and files hold it as gate_proj and up_proj. Source: Shazeer, "GLU variants
// improve transformer", 2020.
class SwigluMlp : public Module {
 public:
  SwigluMlp(std::int64_t dim, std::int64_t hidden, const Device& device = Device::meta())
      : SwigluMlp(dim, hidden, Projections::separate, device) {}
  SwigluMlp(std::int64_t dim, std::int64_t hidden, Projections projections,
            const Device& device = Device::meta())
      : gate_proj(separate(dim, hidden, projections)),
        up_proj(separate(dim, hidden, projections)),
        gate_up_proj(fused(dim, hidden, projections)),
        down_proj(hidden, dim, {.bias = false}) {
    if (is_fused())
      register_module("gate_up_proj", gate_up_proj);
    else
      register_modules("gate_proj", gate_proj, "up_proj", up_proj);
    register_module("down_proj", down_proj);
    if (!device.is_meta()) materialize(device);
  }
  // x [..., dim] -> [..., dim].
  Tensor operator()(const Tensor& x, Caller at = Caller::current()) {
    const CallSite site(at);
    const SharedInput shared;
    return call([&](const Tensor& in) { return down_proj(gated(in)); }, x);
  }
  // residual [..., dim] + this of x; see Product::add_to.
  Tensor add_to(const Tensor& residual, const Tensor& x, Caller at = Caller::current()) {
    const CallSite site(at);
    if (is_hooked()) return residual + (*this)(x);
    const SharedInput shared;
    return down_proj.product.add_to(residual, gated(x));
  }
  // As Product::input_form.
  InputForm input_form() const {
    if (is_hooked()) return {};
    return is_fused() ? gate_up_proj.product.input_form()
                      : common_form(gate_proj.product, up_proj.product);
  }

  Linear gate_proj, up_proj;  // without parameters if fused
  Linear gate_up_proj;        // without parameters if separate
  Linear down_proj;

 private:
  static Linear separate(std::int64_t dim, std::int64_t hidden, Projections projections) {
    if (projections == Projections::fused) return {};
    return {dim, hidden, {.bias = false}};
  }
  static Linear fused(std::int64_t dim, std::int64_t hidden, Projections projections) {
    if (projections == Projections::separate) return {};
    return {
        dim, 2 * hidden, {.bias = false, .parts = {{"gate_proj", hidden}, {"up_proj", hidden}}}};
  }
  bool is_fused() const { return gate_up_proj.weight.defined(); }
  // In the scope in which down_proj reads it.
  Tensor gated(const Tensor& x) {
    const InputForm form = down_proj.product.input_form();
    if (is_fused()) return swiglu(gate_up_proj(x), form);
    const Tensor gate = gate_proj(x);  // before up: as registered, so backward needs them in turn
    return swiglu(gate, up_proj(x), form);
  }
};

// c_proj(gelu(c_fc(x))), with biases. GELU is the tanh form, as in GPT-2. Source: Hendrycks and
// Gimpel, "Gaussian error linear units", 2016.
class GeluMlp : public Module {
 public:
  GeluMlp(std::int64_t dim, std::int64_t hidden, const Device& device = Device::meta())
      : c_fc(dim, hidden), c_proj(hidden, dim) {
    register_module("c_fc", c_fc);
    register_module("c_proj", c_proj);
    if (!device.is_meta()) materialize(device);
  }
  // x [..., dim] -> [..., dim].
  Tensor operator()(const Tensor& x, Caller at = Caller::current()) {
    const CallSite site(at);
    return call([&](const Tensor& in) { return c_proj.product(c_fc.product.gelu(in)); }, x);
  }
  // residual [..., dim] + this of x; see Product::add_to.
  Tensor add_to(const Tensor& residual, const Tensor& x, Caller at = Caller::current()) {
    const CallSite site(at);
    return is_hooked() ? residual + (*this)(x)
                       : c_proj.product.add_to(residual, c_fc.product.gelu(x));
  }
  // As Product::input_form.
  InputForm input_form() const { return is_hooked() ? InputForm() : c_fc.product.input_form(); }

  Linear c_fc, c_proj;
};

}  // namespace tessera::nn
