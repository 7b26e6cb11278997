// What the tests of layers and models share: random inputs from a printed seed, parameters' values,
// and the directional derivative that their gradients are held against.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/module.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

namespace tessera::testing {

struct Draw {
  std::uint64_t seed = fresh_seed();
  Device device = Device::cpu();
  std::mt19937_64 engine{seed};

  std::vector<float> normal(std::int64_t count, double deviation = 1) {
    std::normal_distribution<float> distribution(0, static_cast<float>(deviation));
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& v : values) v = distribution(engine);
    return values;
  }
  Tensor tensor(const Shape& shape, double deviation = 1) {
    return Tensor::from(normal(shape.numel(), deviation), shape, device);
  }
  std::vector<std::int32_t> ids(std::int64_t count, std::int64_t below) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(count));
    for (auto& v : values)
      v = static_cast<std::int32_t>(engine() % static_cast<std::uint64_t>(below));
    return values;
  }
  Tensor tokens(const Shape& shape, std::int64_t vocab) {
    return Tensor::from(ids(shape.numel(), vocab), shape, device);
  }
};

inline void set(const Parameter& parameter, const std::vector<float>& values) {
  const Tensor shard = parameter.shard();
  parameter.assign(Tensor::from(values, shard.shape(), shard.device()));
}
inline std::vector<float> values(const Parameter& parameter) {
  return parameter.shard().to_vector<float>();
}
// Random values for all parameters below `module`, in a range in which nothing saturates.
inline void randomize(nn::Module& module, Draw& draw, double deviation = 0.3) {
  for (const auto& [name, parameter] : module.named_parameters())
    set(parameter, draw.normal(parameter.shape().numel(), deviation));
}

// Holds the gradients of all parameters, and of x, against the slope of L = sum(w y), y = f(x), w
// random, along a random direction d: (L(p + h d) - L(p - h d)) / 2h = <dL/dp, d>.
//
// Tolerance: y is rounded to f32, so L carries an error of about 2^-24 S with S = sqrt(sum (w
// y)^2), and the slope 2^-24 S / h; with h = 2^-8 that is 1.5e-5 S. A few dozen roundings on the
// way to y make it 40 times as much, and extrapolation from h and 2h, which takes the h^2 of the
// truncation error away, 1.5 times that. What is left, 4 h^4 L^(5) / 120, is at most 4 h^4 M / r^5
// where |L| is at most M within r of h = 0, hence below 1e-4 M for r = 0.1 and more; d is of unit
// length over all values, which moves those of one row of a norm by far less than its deviation.
// Allowed: 1e-3 (S + |slope|).
inline void check_slope(nn::Module& module, const std::function<Tensor(const Tensor&)>& f,
                        const std::vector<float>& x, const Shape& shape, Draw& draw) {
  const Device& device = draw.device;
  module.zero_grad();
  Tensor input = Tensor::from(x, shape, device).require_grad();
  const Tensor y = f(input);
  const std::vector<float> w = draw.normal(y.numel());
  y.backward(Tensor::from(w, y.shape(), device));

  std::vector<std::vector<float>> start{x}, gradients{input.grad().to_vector<float>()};
  for (const Parameter& p : module.parameters()) {
    start.push_back(values(p));
    gradients.push_back(p.grad().to_vector<float>());
  }
  std::vector<std::vector<float>> direction;
  double length = 0, slope = 0;
  for (const auto& s : start) {
    direction.push_back(draw.normal(static_cast<std::int64_t>(s.size())));
    for (const float d : direction.back()) length += static_cast<double>(d) * d;
  }
  length = std::sqrt(length);
  for (std::size_t k = 0; k < start.size(); ++k)
    for (std::size_t i = 0; i < start[k].size(); ++i)
      slope += static_cast<double>(gradients[k][i]) * direction[k][i] / length;

  double scale = 0;
  const auto loss_at = [&](double h) {
    const auto moved = [&](std::size_t k) {
      std::vector<float> v = start[k];
      for (std::size_t i = 0; i < v.size(); ++i)
        v[i] = static_cast<float>(v[i] + h * direction[k][i] / length);
      return v;
    };
    std::size_t k = 0;
    for (const Parameter& p : module.parameters()) set(p, moved(++k));
    const NoGradGuard no_grad;
    const auto out = f(Tensor::from(moved(0), shape, device)).to_vector<float>();
    double sum = 0;
    scale = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      sum += static_cast<double>(w[i]) * out[i];
      scale += std::pow(static_cast<double>(w[i]) * out[i], 2);
    }
    scale = std::sqrt(scale);
    return sum;
  };
  const auto difference = [&](double h) { return (loss_at(h) - loss_at(-h)) / (2 * h); };
  const double near = difference(0x1p-8), far = difference(0x1p-7);
  const double measured = near + (near - far) / 3;
  INFO("slope " << slope << ", measured " << measured << ", scale " << scale);
  CHECK(std::abs(slope - measured) <= 1e-3 * (scale + std::abs(slope)));
  CHECK(std::abs(slope) > 0);
}

}  // namespace tessera::testing
