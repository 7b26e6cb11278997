#include "tessera/nn/linear.hpp"

namespace tessera::nn {

Linear::Linear(std::int64_t in, std::int64_t out, const Device& device)
    : Linear(in, out, LinearOptions{}, device) {}

Linear::Linear(std::int64_t in, std::int64_t out, LinearOptions options, const Device& device)
    : weight({out, in}, Initializer::normal(0, kInitialDeviation)) {
  TESSERA_EXPECT(in > 0 && out > 0, "Linear: ", in, " inputs and ", out,
                 " outputs; expected at least one of each");
  register_parameter("weight", weight);
  if (options.bias) {
    bias = Parameter({out}, Initializer::constant(0));
    register_parameter("bias", bias);
  }
  if (!device.is_meta()) materialize(device);
}

Linear::Linear(const Parameter& shared_weight) : weight(shared_weight) {
  TESSERA_EXPECT(weight.defined() && weight.shape().ndim() == 2,
                 "Linear: the shared weight must be a matrix [out, in]");
  register_parameter("weight", weight);
}

Tensor Linear::operator()(const Tensor& x) {
  return call([&] { return linear(x, weight, bias.defined() ? bias.value() : Tensor()); });
}

Activated Linear::gelu(const Tensor& x) {
  return call([&] { return linear_gelu(x, weight, bias.defined() ? bias.value() : Tensor()); });
}

Tensor Linear::operator()(const Activated& x) {
  return call([&] { return linear(x, weight, bias.defined() ? bias.value() : Tensor()); });
}

Tensor Linear::cross_entropy(const Tensor& x, const Tensor& targets, std::int64_t chunk_rows) {
  return call([&] {
    return linear_cross_entropy(x, weight, bias.defined() ? bias.value() : Tensor(), targets,
                                chunk_rows);
  });
}

}  // namespace tessera::nn
