// Lesson 78: three ranks whose graphs differ.
//
// Every rank calls the same blocks, but the loss of rank 1 is made before the last one: backward
// has no gradient for block 3 there. Its peers have, and a reduction is of all ranks. So the order
// of backward comes from the calls, which are the same everywhere, and not from the graph:
//
//   rank 0   0 1 2 3 │ loss      │ 3 2 1 0        what is gathered and reduced,
//   rank 1   0 1 2 ┬ 3           │ 3 2 1 0        in this order, on each rank
//                  └ loss
//   rank 2   0 1 2 3 │ loss      │ 3 2 1 0
//
// What a rank lacks travels as zeros: rank 1 sends zeros for block 3, with a count of 0. Beside
// each gradient travels an arrival count: how many ranks had one. Each rank divides its gradient by
// the number of ranks where it writes it, whatever the count. So the rows of block 3 get (g0 + g2)
// / 3 on the ranks that keep them, and every rank has the count. Where the count is 0, no rank had
// a gradient: it is none, and optimizers leave the parameter alone, without decay too. A rank that
// leaves out a whole backward says `skip_backward` (lesson 83).
//
// PyTorch: FSDP2 reduces in hooks of what a module's backward reaches. Rank 1 would not reduce
// block 3 at its place, and its peers' reductions would meet others, or none. Programs add 0 times
// each unused output to the loss.
#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/module_list.hpp"
#include "tessera/optim/sgd.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

constexpr int kRanks = 3, kBlocks = 4;

// One reduction as this rank saw it.
struct Reduced {
  int block;
  float count;
  bool operator==(const Reduced&) const = default;
};

// Blocks of one weight each, which is 1: block k multiplies by it.
class Chain : public ts::nn::Module {
 public:
  explicit Chain(const ts::World& world) {
    for (int k = 0; k < kBlocks; ++k)
      blocks.emplace_back(1, 1, ts::nn::LinearOptions{.bias = false});
    register_module("blocks", blocks);
    const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world)};
    for (ts::nn::Linear& block : blocks) ts::fully_shard(block, options);
    ts::fully_shard(*this, options);
    materialize(world.device());
    for (int k = 0; k < kBlocks; ++k) {
      ts::nn::Linear& block = blocks[static_cast<std::size_t>(k)];
      block.weight.edit([](const ts::Tensor& rows) { ts::raw::fill(rows, 1); });
      // Called by each reduction of the block, where values and counts are there.
      const auto look = [this, k](const ts::ReducedGradient& g) {
        reduced.push_back({k, g.counts.to_vector<float>().at(0)});
      };
      ts::set_all_reduce_hook(block, look, ts::StreamId::compute);
    }
  }
  // The outputs behind each of the first `called` blocks.
  std::vector<ts::Tensor> operator()(float x, int called = kBlocks) {
    std::vector<ts::Tensor> outputs{ts::Tensor::from({x}, {1, 1}, blocks[0].weight.device())};
    call([&] {
      for (int k = 0; k < called; ++k)
        outputs.push_back(blocks[static_cast<std::size_t>(k)](outputs.back()));
      return outputs.back();
    });
    return outputs;
  }
  ts::nn::ModuleList<ts::nn::Linear> blocks;
  std::vector<Reduced> reduced;
};

// A weight or gradient of one element, which lies on rank 0.
static double only(const ts::World& world, const ts::Tensor& mine) {
  return world.sum(mine.numel() > 0 ? ts::sum(mine).item() : 0);
}

// Rank r has the input r + 1, so a weight's gradient there is r + 1.
static void one_graph_is_shorter() {
  ts::run_local(kRanks, {}, [](ts::World& world) {
    Chain chain(world);
    const std::vector<ts::Tensor> outputs = chain(static_cast<float>(world.rank() + 1));
    const bool leaves_out = world.rank() == 1;
    ts::sum(outputs[leaves_out ? 3 : 4]).backward();

    CHECK((chain.reduced == std::vector<Reduced>{{3, 2}, {2, 3}, {1, 3}, {0, 3}}));  // on each rank
    CHECK(ts::shard_counters(chain).reductions == kBlocks);
    std::vector<double> gradients;
    for (const ts::nn::Linear& block : chain.blocks)
      gradients.push_back(only(world, block.weight.grad()));
    if (world.rank() == 2) {
      std::cout << "1. Rank 1's loss leaves block 3 out. Rank 2 reduced:\n";
      for (const Reduced& r : chain.reduced)
        std::cout << "   block " << r.block << ": " << r.count
                  << " of 3 ranks had a gradient, mean "
                  << gradients[static_cast<std::size_t>(r.block)] << '\n';
    }
    CHECK(std::abs(gradients[3] - (1 + 0 + 3) / 3.) < 1e-6);  // one rounding of f32
    CHECK(gradients[0] == (1 + 2 + 3) / 3.);
  });
}

static void no_graph_has_it() {
  ts::run_local(kRanks, {}, [](ts::World& world) {
    Chain chain(world);
    ts::optim::SGD optimizer(chain.parameters(), {.lr = 0.5, .weight_decay = 0.5});
    ts::sum(chain(1)[3]).backward();
    optimizer.step();
    const double used = only(world, chain.blocks[2].weight.shard());
    const double unused = only(world, chain.blocks[3].weight.shard());
    CHECK((chain.reduced.front() == Reduced{3, 0}));
    CHECK(used == 1 - 0.5 * (1 + 0.5) && unused == 1);
    if (world.rank() == 2)
      std::cout << "2. No rank uses block 3: count " << chain.reduced.front().count
                << ", and its weight stays " << unused
                << ", though decay and gradient took that of "
                << "block 2 to " << used << '\n';
  });
}

// What must not differ are the calls.
static void a_call_is_missing() {
  std::string heard;
  try {
    ts::run_local(kRanks, {.timeout_seconds = 5}, [](ts::World& world) {
      Chain chain(world);
      ts::sum(chain(1, world.rank() == 1 ? 3 : 4).back()).backward();
      world.device().synchronize();
    });
  } catch (const ts::CommError& error) {  // every rank's, and names the unit
    heard = error.what();
  }
  std::cout << "3. Rank 1 does not even call block 3:\n   " << heard << '\n';
  CHECK(heard.find("blocks.3") != std::string::npos);
}

int main() {
  one_graph_is_shorter();
  no_graph_has_it();
  a_call_is_missing();
}
