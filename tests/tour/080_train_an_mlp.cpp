// Lesson 80: train an MLP, sharded over three ranks.
//
// The same program as on one rank: build on meta, shard, materialize, init, train. Each linear
// layer is a unit, so its gather runs while the layer before it computes, and its reduction while
// the layer before it goes backward. `down`, called last, stays gathered through the turn:
//
//   gather   │ up │ down │ up │
//   compute       │ up   │ down │ loss │ down │ up │      │ step
//   reduce                                    │ down │ up │
//
// The root, made last, has no parameters left to claim. It still gives the layers common slots and
// one order of calls; without it each layer would be a root of its own, gathered once and kept open
// until its backward ends.
//
// The lesson trains on one rank and on three and compares: sharding changes where numbers live, not
// what they are.
//
// PyTorch: the same steps, with `torch.device("meta")`, `fully_shard`, `to_empty` and
// `reset_parameters`. The optimizer there goes through a list of shards, one a parameter; here a
// unit's shards are one flat array, which one kernel updates.
#include <cmath>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

class Mlp : public ts::nn::Module {
 public:
  Mlp() : up(2, 32), down(32, 1) {
    register_module("up", up);
    register_module("down", down);
  }
  ts::Tensor operator()(const ts::Tensor& x) {
    return call([&] { return down(ts::tanh(up(x))); });
  }
  ts::nn::Linear up, down;
};

// The rows [begin, end) of 24 points (a, b) in a square, and a^2 - b for each.
static void points(int begin, int end, std::vector<float>& x, std::vector<float>& y) {
  for (int i = begin; i < end; ++i) {
    const int column = i % 6, row = i / 6;
    const float a = static_cast<float>(column) / 2.5f - 1, b = static_cast<float>(row) / 1.5f - 1;
    x.insert(x.end(), {a, b});
    y.push_back(a * a - b);
  }
}

// Losses of 300 steps on `ranks` ranks; every rank sees its share of the points.
static std::vector<double> train(int ranks) {
  std::vector<double> losses;
  ts::run_local(ranks, {}, [&](ts::World& world) {
    Mlp mlp;
    const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world)};
    ts::fully_shard(mlp.up, options);
    ts::fully_shard(mlp.down, options);
    ts::fully_shard(mlp, options);
    mlp.materialize(world.device());
    ts::nn::init(mlp, {.value = 7});
    ts::optim::AdamW optimizer(mlp.parameters(), {.lr = 1e-2, .weight_decay = 0});
    const std::string plan = ts::shard_plan(mlp).to_string();  // collective: every rank asks
    if (world.rank() == 0 && ranks > 1) std::cout << plan;

    const int share = 24 / world.size();
    std::vector<float> x, y;
    points(world.rank() * share, (world.rank() + 1) * share, x, y);
    const ts::Tensor inputs = ts::Tensor::from(x, {share, 2}, world.device());
    const ts::Tensor targets = ts::Tensor::from(y, {share, 1}, world.device());
    for (int step = 0; step < 300; ++step) {
      const ts::Tensor error = mlp(inputs) - targets;
      const ts::Tensor loss = ts::mean(error * error);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      const double mean = world.sum(loss.item()) / world.size();
      if (world.rank() == 0) losses.push_back(mean);
    }
  });
  return losses;
}

int main() {
  const std::vector<double> one = train(1), three = train(3);
  for (const int step : {0, 100, 299})
    std::cout << "step " << std::setw(3) << step << ": loss " << std::fixed << one[step]
              << " on one rank, " << three[step] << " on three\n";
  CHECK(one.back() < 0.01 * one.front());
  // The ranks' sums round in another order: a few f32 rounding errors (6e-8) a step, carried
  // through the early steps.
  for (int step = 0; step < 50; ++step) CHECK(std::abs(one[step] - three[step]) < 1e-4 * one[step]);
}
