// A small stack in training whose shards lie on the host, or on the device.
#pragma once

#include <vector>

#include "tessera/optim/clip.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

namespace tessera::testing {

// A stack in training, on the host or not.
struct OffloadJob {
  OffloadJob(const World& world, Offload offload, DType param = f32, DType reduce = f32,
             int replicas = 1)
      : world(world) {
    stack.shard({.mesh = mesh_of(world, replicas),
                 .precision = {.param = param, .reduce = reduce},
                 .piece_bytes = 64,
                 .offload = offload});
    nn::init(stack, {3}, world.device());
  }
  Tensor loss(int k) {
    const Tensor x = rows_of(static_cast<std::uint64_t>(k), 2 * world.rank(), 2, 4, world.device());
    return mean_square(stack(x));
  }
  // The norm before clipping.
  float step(int k, optim::Optimizer& optimizer, int micro_batches = 1,
             optim::NormType type = optim::NormType::l2) {
    for (int m = 0; m < micro_batches; ++m) loss(10 * k + m).backward();
    const Tensor norm = optim::clip_grad_norm(stack.parameters(), 0.5, type);
    optimizer.step();
    const auto value = static_cast<float>(norm.item());
    optimizer.zero_grad();
    return value;
  }

  const World& world;
  Stack stack{{4, 5, 3}};
};

// What is left of a training.
struct OffloadRun {
  std::vector<float> norms;
  Values parameters, gradients;
};
inline bool same_bits(const OffloadRun& a, const OffloadRun& b) {
  return testing::same_bits(a.norms, b.norms) && testing::same_bits(a.parameters, b.parameters) &&
         testing::same_bits(a.gradients, b.gradients);
}

}  // namespace tessera::testing
