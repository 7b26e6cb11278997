// Lesson 83: leave a backward out.
//
// Of three ranks one has a bad batch: its loss is no number. It must not go backward, and its peers
// wait in every reduction for what it sends. What can it do?
//
//   rank 0   forward │ backward      │ step      gathers and reductions: one order on all ranks
//   rank 1   forward │ skip_backward │ step      the same ones, with zeros and counts of 0
//   rank 2   forward │ backward      │ step
//
// It says so, in the place of its backward: `skip_backward(loss)` goes back along the same calls,
// gathers and reduces as its peers do, and runs no derivative. The reduced gradient is the sum of
// the others, divided by the number of ranks all the same. Each parameter has an arrival count
// beside its gradient: where no rank had any, optimizers leave the parameter alone.
//
// No rank asks the others whether they went backward: that would be a collective and a wait in
// every step. A rank that leaves a backward out without a word is found by what it does next: each
// rank hears of the first call in which they part, of the forward, and of what to say. `reset`
// leaves that step behind.
//
// PyTorch: FSDP2's reductions are issued by hooks of autograd. A rank that does not call `backward`
// issues none, and its peers hang until NCCL's watchdog ends the job. Programs multiply the loss by
// zero instead, which of NaN is NaN, or agree on the loss before each backward.
#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/optim/sgd.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/reset.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

constexpr int kRanks = 3;

// One weight w, 1 at first, a unit of its own: the loss w x has the gradient x.
class Line : public ts::nn::Module {
 public:
  explicit Line(const ts::World& world) : layer(1, 1, {.bias = false}) {
    register_module("layer", layer);
    ts::fully_shard(layer, {.mesh = ts::DeviceMesh::flat(world)});
    ts::fully_shard(*this, {.mesh = ts::DeviceMesh::flat(world)});
    materialize(world.device());
    ts::nn::init(*this, {.value = 7});
    layer.weight.edit([](const ts::Tensor& rows) { ts::raw::fill(rows, 1); });
  }
  ts::Tensor operator()(float x) {
    const ts::Tensor in = ts::Tensor::from({x}, {1, 1}, layer.weight.device());
    return call([&] { return ts::sum(layer(in)); });
  }
  // The weight lies on rank 0.
  double weight(const ts::World& world) const {
    const ts::Tensor mine = layer.weight.shard();
    return world.sum(mine.numel() > 0 ? ts::sum(mine).item() : 0);
  }
  ts::nn::Linear layer;
};

// Rank r has the batch r + 1, rank 1 a bad one.
static float batch(const ts::World& world) {
  if (world.rank() == 1) return std::numeric_limits<float>::quiet_NaN();
  return static_cast<float>(world.rank() + 1);
}

static void a_rank_says_that_it_leaves_it_out() {
  ts::run_local(kRanks, {}, [](ts::World& world) {
    Line line(world);
    ts::optim::SGD optimizer(line.parameters(), {.lr = 0.3});
    const ts::Tensor loss = line(batch(world));
    if (std::isfinite(loss.item()))
      loss.backward();
    else
      ts::skip_backward(loss);
    optimizer.step();
    const double weight = line.weight(world);  // 1 - 0.3 (1 + 0 + 3) / 3
    CHECK(std::abs(weight - 0.6) < 1e-6);
    if (world.rank() == 0)
      std::cout << "1. batches 1, NaN and 3 took the weight from 1 to " << weight << '\n';
  });
}

static void where_no_rank_goes_backward_nothing_is_updated() {
  ts::run_local(kRanks, {}, [](ts::World& world) {
    Line line(world);
    ts::optim::SGD optimizer(line.parameters(), {.lr = 0.3, .weight_decay = 0.5});
    line(1);
    ts::skip_backward(line);  // of all forwards that no backward has covered
    optimizer.step();
    const double weight = line.weight(world);
    CHECK(weight == 1);  // not even decay
    if (world.rank() == 0)
      std::cout << "2. no rank went backward, and decay left the weight at " << weight << '\n';
  });
}

static void a_rank_without_a_word_is_found() {
  ts::run_local(kRanks, {.timeout_seconds = 5}, [](ts::World& world) {
    Line line(world);
    std::string heard;
    try {
      const ts::Tensor loss = line(batch(world));
      if (std::isfinite(loss.item())) loss.backward();  // and else nothing
      world.sum(loss.item());                           // the next that all of them do
    } catch (const ts::CommError& error) {
      heard = error.what();
    }
    CHECK(heard.find("forward 1") != std::string::npos);
    CHECK(heard.find("skip_backward") != std::string::npos);
    if (world.rank() == 0) std::cout << "3. rank 0 heard: " << heard << '\n';
    ts::reset(line, heard);
    line(1).backward();  // as if that step had not been
    CHECK(line.weight(world) == 1);
  });
}

int main() {
  a_rank_says_that_it_leaves_it_out();
  where_no_rank_goes_backward_nothing_is_updated();
  a_rank_without_a_word_is_found();
}
