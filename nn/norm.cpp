#include "tessera/nn/norm.hpp"

namespace tessera::nn {

RMSNorm::RMSNorm(std::int64_t dim, double eps, const Device& device)
    : weight({dim}, Initializer::constant(1)), eps_(eps) {
  TESSERA_EXPECT(dim > 0 && eps >= 0, "RMSNorm: dim ", dim, " and eps ", eps,
                 "; expected at least 1 and at least 0");
  register_parameter("weight", weight);
  if (!device.is_meta()) materialize(device);
}

Tensor RMSNorm::operator()(const Tensor& x) {
  return call([&] { return rms_norm(x, weight, eps_); });
}

SumAndNorm RMSNorm::of_sum(const Tensor& x, Tensor residual) {
  return call([&] { return add_rms_norm(x, std::move(residual), weight, eps_); });
}

LayerNorm::LayerNorm(std::int64_t dim, double eps, const Device& device)
    : weight({dim}, Initializer::constant(1)), bias({dim}, Initializer::constant(0)), eps_(eps) {
  TESSERA_EXPECT(dim > 0 && eps >= 0, "LayerNorm: dim ", dim, " and eps ", eps,
                 "; expected at least 1 and at least 0");
  register_parameter("weight", weight);
  register_parameter("bias", bias);
  if (!device.is_meta()) materialize(device);
}

Tensor LayerNorm::operator()(const Tensor& x) {
  return call([&] { return layer_norm(x, weight, bias, eps_); });
}

SumAndNorm LayerNorm::of_sum(const Tensor& x, Tensor residual) {
  return call([&] { return add_layer_norm(x, std::move(residual), weight, bias, eps_); });
}

}  // namespace tessera::nn
