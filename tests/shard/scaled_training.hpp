// A Scaled in training, in the ways in which parameters may be cut.
#pragma once

#include <cstdint>
#include <functional>

#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

namespace tessera::testing {

struct ScaledWay {
  Reshard reshard = Reshard::automatic;
  MixedPrecision precision{};
  Offload offload = Offload::none;
  int replicas = 1;
  bool is_recomputed = false;
  bool accumulates = false;   // two micro-batches
  bool reduces_once = false;  // of them
  bool has_values = false;    // before it is sharded
};

// Three steps of SGD on 12 rows, of which each rank has its part.
inline void train_scaled(Scaled& net, const World& world, const ScaledWay& way, std::uint64_t seed,
                         const std::function<Shard(const Parameter&)>& placement = {}) {
  net.is_recomputed = way.is_recomputed;
  if (way.has_values) nn::init(net, {seed}, world.device());
  optim::SGD optimizer(net.parameters(), {.lr = 1e-3});
  net.shard({.mesh = mesh_of(world, way.replicas),
             .precision = way.precision,
             .reshard_after_forward = way.reshard,
             .offload = way.offload,
             .shard_placement_fn = placement});
  if (!way.has_values) nn::init(net, {seed}, world.device());
  const Tensor x = own_rows(world, seed, 12 / world.size(), net.up.weight.shape()[1]);
  for (int step = 0; step < 3; ++step) {
    const int micro_batches = way.accumulates || way.reduces_once ? 2 : 1;
    for (int micro = 0; micro < micro_batches; ++micro) {
      if (way.reduces_once) set_requires_gradient_sync(net, micro == 1);
      mean_square(net(x)).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
}

}  // namespace tessera::testing
