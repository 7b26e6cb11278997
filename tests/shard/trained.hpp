// A stack that is trained on a world, for tests of what a program decides while it runs.
#pragma once

#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"

namespace tessera::testing {

// Stack on a world, with its optimizer, and rows of input of this rank.
struct TrainedStack {
  TrainedStack(World& world, Reshard way, const std::vector<std::int64_t>& widths = {4, 4, 4, 4},
               DType param = f32)
      : world(world), model(widths) {
    model.shard({.mesh = DeviceMesh::flat(world),
                 .precision = {.param = param},
                 .reshard_after_forward = way});
    nn::init(model, {3}, world.device());
    optimizer.emplace(model.parameters(), optim::SGDOptions{.lr = 0.1});
  }
  Tensor loss(std::uint64_t seed = 1) {
    return mean_square(model(rows_of(seed, 2 * world.rank(), 2, 4, world.device())));
  }
  void update() {
    optimizer->step();
    optimizer->zero_grad();
  }
  std::uint64_t gathers() { return shard_counters(model).gathers; }
  // How many `f` queues.
  template <class F>
  std::uint64_t gathers_of(const F& f) {
    const std::uint64_t before = gathers();
    f();
    return gathers() - before;
  }
  nn::Linear& layer(std::size_t i) { return model.layers[i]; }
  std::vector<float> first_weight() { return layer(0).weight.value().to_vector<float>(); }

  World& world;
  Stack model;
  std::optional<optim::SGD> optimizer;
};

}  // namespace tessera::testing
