#include "tessera/nn/mlp.hpp"

#include "tessera/autograd/ops.hpp"

namespace tessera::nn {
namespace {

Linear separate(std::int64_t dim, std::int64_t hidden, Projections projections) {
  if (projections == Projections::fused) return {};
  return {dim, hidden, {.bias = false}};
}
Linear fused(std::int64_t dim, std::int64_t hidden, Projections projections) {
  if (projections == Projections::separate) return {};
  return {dim, 2 * hidden, {.bias = false, .parts = {{"gate_proj", hidden}, {"up_proj", hidden}}}};
}

}  // namespace

SwigluMlp::SwigluMlp(std::int64_t dim, std::int64_t hidden, const Device& device)
    : SwigluMlp(dim, hidden, Projections::separate, device) {}

SwigluMlp::SwigluMlp(std::int64_t dim, std::int64_t hidden, Projections projections,
                     const Device& device)
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

std::optional<Fp8Recipe> SwigluMlp::takes_rounded() const {
  if (is_hooked()) return {};
  return is_fused() ? gate_up_proj.takes_rounded() : all_take_rounded(gate_proj, up_proj);
}

// In the scope in which down_proj reads it.
Tensor SwigluMlp::gated(const Tensor& x) {
  const std::optional<Fp8Recipe> rounded = down_proj.takes_rounded();
  if (is_fused()) return swiglu(gate_up_proj(x), rounded);
  const Tensor gate = gate_proj(x);  // before up: as registered, so backward needs them in turn
  return swiglu(gate, up_proj(x), rounded);
}

Tensor SwigluMlp::operator()(const Tensor& x, Caller at) {
  const CallSite site(at);
  const SharedFp8Input shared;
  return call([&](const Tensor& in) { return down_proj(gated(in)); }, x);
}

Tensor SwigluMlp::add_to(const Tensor& residual, const Tensor& x, Caller at) {
  const CallSite site(at);
  if (is_hooked()) return residual + (*this)(x);
  const SharedFp8Input shared;
  return down_proj.add_to(residual, gated(x));
}

GeluMlp::GeluMlp(std::int64_t dim, std::int64_t hidden, const Device& device)
    : c_fc(dim, hidden), c_proj(hidden, dim) {
  register_module("c_fc", c_fc);
  register_module("c_proj", c_proj);
  if (!device.is_meta()) materialize(device);
}

std::optional<Fp8Recipe> GeluMlp::takes_rounded() const {
  return is_hooked() ? std::nullopt : c_fc.takes_rounded();
}

Tensor GeluMlp::operator()(const Tensor& x, Caller at) {
  const CallSite site(at);
  return call([&](const Tensor& in) { return c_proj(c_fc.gelu(in)); }, x);
}

Tensor GeluMlp::add_to(const Tensor& residual, const Tensor& x, Caller at) {
  const CallSite site(at);
  return is_hooked() ? residual + (*this)(x) : c_proj.add_to(residual, c_fc.gelu(x));
}

}  // namespace tessera::nn
