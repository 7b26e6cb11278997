// A bag of parameters, and gradients put where the test wants them.
#pragma once

#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/module.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

namespace tessera::testing {

using Values = std::vector<float>;

// Parameters of the given shapes, named "0", "1", ...
class Bag : public nn::Module {
 public:
  explicit Bag(const std::vector<Shape>& shapes) {
    for (const Shape& shape : shapes) {
      items.emplace_back(shape, Initializer::constant(0));
      register_parameter(std::to_string(items.size() - 1), items.back());
    }
  }
  void materialize(const Device& device) { nn::init(*this, {0}, device); }
  std::vector<Parameter> items;
};

struct Draw {
  std::uint64_t seed = fresh_seed();
  std::mt19937_64 engine{seed};

  // Magnitudes in [low, high), random signs.
  Values values(std::int64_t count, float low, float high) {
    std::uniform_real_distribution<float> magnitude(low, high);
    Values out(static_cast<std::size_t>(count));
    for (float& v : out) v = (engine() & 1) != 0 ? magnitude(engine) : -magnitude(engine);
    return out;
  }
};

inline void set(const Parameter& parameter, const Values& values) {
  const Tensor shard = parameter.shard();
  parameter.assign(Tensor::from(values, shard.shape(), shard.device()));
}
inline Values get(const Parameter& parameter) { return parameter.shard().to_vector<float>(); }

// Backward of sum(p * g) for every parameter with a g: its gradient becomes g, exactly.
inline void give_gradients(Bag& bag, const std::map<std::size_t, Values>& gradients) {
  Tensor loss;
  for (const auto& [i, g] : gradients) {
    const Parameter& p = bag.items[i];
    const Tensor part = sum(p.value() * Tensor::from(g, p.shape(), p.shard().device()));
    loss = loss.defined() ? loss + part : part;
  }
  loss.backward();
}

}  // namespace tessera::testing
