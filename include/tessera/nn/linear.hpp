// y = x W^T + b, the layer that holds most of a model's parameters.
//
// As for all layers: built on `meta` its parameters wait for `materialize` on the outermost module;
// built on a real device they get their memory at once. Values are set by nn::init or loaded.
#pragma once

#include "tessera/nn/module.hpp"

namespace tessera::nn {

// Of every weight matrix, as GPT-2 and Llama start.
inline constexpr double kInitialDeviation = 0.02;

struct LinearOptions {
  bool bias = true;
};

class Linear : public Module {
 public:
  Linear(std::int64_t in, std::int64_t out, const Device& device = Device::meta());
  Linear(std::int64_t in, std::int64_t out, LinearOptions options,
         const Device& device = Device::meta());
  // Without bias, and with the weight [out, in] of another module: a tied head.
  explicit Linear(const Parameter& shared_weight);

  // x [..., in] of the weight's dtype -> [..., out].
  Tensor operator()(const Tensor& x);

  Parameter weight;  // [out, in], normal
  Parameter bias;    // [out], 0; undefined without
};

}  // namespace tessera::nn
