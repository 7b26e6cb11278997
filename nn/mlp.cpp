#include "tessera/nn/mlp.hpp"

#include "tessera/autograd/ops.hpp"

namespace tessera::nn {

SwigluMlp::SwigluMlp(std::int64_t dim, std::int64_t hidden, const Device& device)
    : gate_proj(dim, hidden, {.bias = false}),
      up_proj(dim, hidden, {.bias = false}),
      down_proj(hidden, dim, {.bias = false}) {
  register_module("gate_proj", gate_proj);
  register_module("up_proj", up_proj);
  register_module("down_proj", down_proj);
  if (!device.is_meta()) materialize(device);
}

Tensor SwigluMlp::operator()(const Tensor& x, Caller at) {
  const CallSite site(at);
  const auto forward = [&](const Tensor& in) {
    const Tensor gate = gate_proj(in);  // before up: as registered, so backward needs them in turn
    return down_proj(swiglu(gate, up_proj(in)));
  };
  return call(forward, x);
}

GeluMlp::GeluMlp(std::int64_t dim, std::int64_t hidden, const Device& device)
    : c_fc(dim, hidden), c_proj(hidden, dim) {
  register_module("c_fc", c_fc);
  register_module("c_proj", c_proj);
  if (!device.is_meta()) materialize(device);
}

Tensor GeluMlp::operator()(const Tensor& x, Caller at) {
  const CallSite site(at);
  return call([&](const Tensor& in) { return c_proj(c_fc.gelu(in)); }, x);
}

}  // namespace tessera::nn
