// A model whose units a program calls in any order, for tests of where slots lie.
#pragma once

#include <vector>

#include "tests/shard/support.hpp"

namespace tessera::testing {

// Layers that a forward calls in any order; the root's own parameter scales the result.
class Layers : public nn::Module {
 public:
  explicit Layers(int count = 5) : scale({6}, Initializer::normal(1, 0.1)) {
    for (int i = 0; i < count; ++i) layers.emplace_back(6, 6);
    register_module("layers", layers);
    register_parameter("scale", scale);
    make_positive(*this);
  }
  Tensor operator()(const Tensor& x, const std::vector<int>& order) {
    return call([&] {
      Tensor h = x;
      for (const int i : order) h = tanh(layers[static_cast<std::size_t>(i)](h));
      return h * scale.value();
    });
  }
  void shard(const ShardOptions& options) {
    for (nn::Linear& layer : layers) fully_shard(layer, options);
    fully_shard(*this, options);
  }

  nn::ModuleList<nn::Linear> layers;
  Parameter scale;
};

}  // namespace tessera::testing
