// Lesson 87: stream a table.
//
// The largest parameters of a model are often tables: of a vocabulary, of memories. A unit would
// gather one as a whole, and hold its whole gradient until that is reduced. But a layer that uses a
// table row by row needs no more than a part of it at a time. It says so, and is given slices:
//
//   rank 0's rows │ 0 │ 1 │ 2 │     slice 1, gathered: rows [c, 2c) of every rank's chunk
//   rank 1's rows │ 0 │ 1 │ 2 │     ──▶ │ of rank 0 │ of rank 1 │
//
// Each slice is gathered, used, reduced and planned as a unit of its own, so a table costs no more
// memory than a block. What a rank keeps is what it was: its rows, in one piece.
//
// PyTorch: fully_shard gathers parameters as wholes. Programs cut large heads by hand into modules
// of their own, whose shards and files are then others.
#include <cmath>
#include <iostream>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/optim/sgd.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

// An associative memory: y = relu(x K^T) K. It is a sum over the rows of K, so slices add up.
class Memories : public ts::nn::Module {
 public:
  Memories(std::int64_t rows, std::int64_t width)
      : keys({rows, width}, ts::Initializer::normal(0, 0.03)) {
    register_parameter("keys", keys);
    stream_parameter(keys);  // from here on there is no keys.value()
  }
  ts::Tensor operator()(const ts::Tensor& x) {
    return call([&] {
      ts::Tensor y;
      keys.for_each_slice([&](const ts::Tensor& slice, const ts::SliceRows&) {
        const ts::Tensor part = ts::matmul(ts::relu(ts::linear(x, slice)), slice);
        y = y.defined() ? y + part : part;
      });
      return y;
    });
  }
  ts::Parameter keys;
};

class Model : public ts::nn::Module {
 public:
  Model() : in(64, 64), memories(1024, 64) {
    register_module("in", in);
    register_module("memories", memories);
  }
  ts::Tensor operator()(const ts::Tensor& x) {
    return call([&] { return memories(ts::tanh(in(x))); });
  }
  ts::nn::Linear in;
  Memories memories;
};

struct Trained {
  std::vector<double> losses;
  std::int64_t slots, slices;
};

static Trained train(ts::World& world, std::int64_t slice_bytes) {
  Model model;
  const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world), .slice_bytes = slice_bytes};
  ts::fully_shard(model.in, options);
  ts::fully_shard(model.memories, options);
  ts::fully_shard(model, options);
  model.materialize(world.device());
  ts::nn::init(model, {.value = 7});
  ts::optim::SGD optimizer(model.parameters(), {.lr = 0.2});
  Trained trained;
  for (int step = 0; step < 3; ++step) {
    const ts::Tensor x = ts::Tensor::normal({16, 64}, 0, 1, 100, ts::f32, world.device());
    const ts::Tensor error = model(x) - x;
    const ts::Tensor loss = ts::mean(error * error);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    trained.losses.push_back(loss.item());
  }
  trained.slots = ts::shard_plan(model).arena_bytes;
  trained.slices = model.memories.keys.slices();
  if (world.rank() == 0 && trained.slices > 1) std::cout << ts::shard_plan(model).to_string();
  return trained;
}

int main() {
  Trained whole, streamed;
  std::cout
      << "1. A table of 256 KiB on two ranks, in slices of 64 KiB. Without slice_bytes they were\n"
         "   no larger than the largest other unit:\n";
  ts::run_local(2, {}, [&](ts::World& world) {
    const Trained sliced = train(world, 64 << 10), at_once = train(world, 1 << 30);
    if (world.rank() == 0) streamed = sliced, whole = at_once;
  });
  std::cout << "2. " << streamed.slices << " slices need " << streamed.slots / 1024
            << " KiB of slots, one needs " << whole.slots / 1024 << " KiB\n";
  CHECK(streamed.slices == 4 && whole.slices == 1);
  CHECK(2 * streamed.slots < whole.slots);
  std::cout << "3. Losses of three steps, streamed and at once:";
  for (std::size_t step = 0; step < 3; ++step) {
    std::cout << ' ' << streamed.losses[step] << " and " << whole.losses[step]
              << (step < 2 ? "," : "\n");
    // The same sum over 1024 rows, in another order.
    CHECK(std::abs(streamed.losses[step] - whole.losses[step]) < 1e-4 * whole.losses[step]);
  }
  CHECK(streamed.losses[2] < streamed.losses[0]);
}
