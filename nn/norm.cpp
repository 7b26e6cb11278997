#include "tessera/nn/norm.hpp"

namespace tessera::nn {

RMSNorm::RMSNorm(std::int64_t dim, double eps, const Device& device)
    : weight({dim}, Initializer::constant(1)), eps_(eps) {
  TESSERA_EXPECT(dim > 0 && eps >= 0, "RMSNorm: dim ", dim, " and eps ", eps,
                 "; expected at least 1 and at least 0");
  register_parameter("weight", weight);
  if (!device.is_meta()) materialize(device);
}

Tensor RMSNorm::operator()(const Tensor& x, std::optional<Fp8Recipe> rounded, Caller at) {
  if (is_hooked()) rounded.reset();
  const CallSite site(at);
  return call([&](const Tensor& in) { return rms_norm(in, weight, eps_, rounded); }, x);
}

SumAndNorm RMSNorm::of_sum(const Tensor& x, Tensor residual, std::optional<Fp8Recipe> rounded,
                           Caller at) {
  if (is_hooked()) rounded.reset();
  const CallSite site(at);
  return call([&] { return add_rms_norm(x, std::move(residual), weight, eps_, rounded); });
}

LayerNorm::LayerNorm(std::int64_t dim, double eps, const Device& device)
    : weight({dim}, Initializer::constant(1)), bias({dim}, Initializer::constant(0)), eps_(eps) {
  TESSERA_EXPECT(dim > 0 && eps >= 0, "LayerNorm: dim ", dim, " and eps ", eps,
                 "; expected at least 1 and at least 0");
  register_parameter("weight", weight);
  register_parameter("bias", bias);
  if (!device.is_meta()) materialize(device);
}

Tensor LayerNorm::operator()(const Tensor& x, std::optional<Fp8Recipe> rounded, Caller at) {
  if (is_hooked()) rounded.reset();
  const CallSite site(at);
  return call([&](const Tensor& in) { return layer_norm(in, weight, bias, eps_, rounded); }, x);
}

SumAndNorm LayerNorm::of_sum(const Tensor& x, Tensor residual, std::optional<Fp8Recipe> rounded,
                             Caller at) {
  if (is_hooked()) rounded.reset();
  const CallSite site(at);
  return call([&] { return add_layer_norm(x, std::move(residual), weight, bias, eps_, rounded); });
}

}  // namespace tessera::nn
