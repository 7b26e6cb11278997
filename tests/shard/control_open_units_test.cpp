// Units that stay open after backward: how often they are gathered, reduced and summed, where some
// micro-batches reduce nothing.
#include <cstdint>
#include <vector>

#include "tessera/distributed/distributed_tensor.hpp"
#include "tests/shard/micro_batches.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A nested block, a unit behind it, and the root's own scale.
struct OpenModel final : nn::Module {
  OpenModel() {
    register_modules("block", block, "last", last);
    register_parameter("scale", scale);
    make_positive(*this);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return tanh(last(tanh(block(x)))) * scale.value(); });
  }
  void shard(const ShardOptions& options) {
    shard_each({&block.inner, &block, &last, this}, options);
  }
  NestedBlock block{5, 7};
  nn::Linear last{5, 3};
  Parameter scale{{3}, Initializer::normal(1, 0.1)};
};

enum class Open { none, root, all };  // after backward

struct OpenSteps {
  std::vector<std::uint64_t> gathers, reductions, all_reduces;  // of each step
  Values gradients;                                             // whole, of the first
  Values parameters;
};
OpenSteps open_steps(World& world, int replicas, Reshard reshard, Way way, Open open) {
  const DeviceMesh mesh = mesh_of(world, replicas);
  OpenModel model;
  model.shard({.mesh = mesh, .reshard_after_forward = reshard_on(mesh, reshard)});
  nn::init(model, {11}, world.device());
  if (open != Open::none) set_reshard_after_backward(model, false, /*recurse=*/open == Open::all);
  optim::SGD optimizer(model.parameters(), {.lr = 0.05});
  OpenSteps found;
  for (int step = 0; step < 3; ++step) {
    const ShardCounters before = shard_counters(model);
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      begin_micro_batch(way, model, model.block.inner, micro + 1 == kMicroBatches);
      (mean_square(model(micro_batch(world, step, micro))) / kMicroBatches).backward();
    }
    const ShardCounters after = shard_counters(model);
    found.gathers.push_back(after.gathers - before.gathers);
    found.reductions.push_back(after.reductions - before.reductions);
    found.all_reduces.push_back(after.all_reduces - before.all_reduces);
    if (step == 0)
      for (const auto& [name, p] : model.named_parameters())
        found.gradients[name] = p.distributed_grad().full().to_vector<float>();
    optimizer.step();
    optimizer.zero_grad();
  }
  found.parameters = full_values(model);
  return found;
}

}  // namespace

TEST_CASE("units that backward leaves open, nested and hybrid, are counted whenever they reduce",
          "[threads][fsdp2-044]") {
  const auto [replicas, ranks] = GENERATE(std::pair(1, 2), std::pair(1, 4), std::pair(2, 4));
  const Reshard reshard = GENERATE(as<Reshard>{}, Reshard::never, Reshard::always, Reshard::to(2));
  const Way way = GENERATE(Way::sync, Way::no_sync, Way::no_sync_of_one, Way::no_sync_of_root,
                           Way::no_all_reduce);
  CAPTURE(replicas, ranks, reshard, static_cast<int>(way));
  const auto run = [&, replicas = replicas](int count, Open open) {
    return on_ranks(count,
                    [&](World& world) { return open_steps(world, replicas, reshard, way, open); });
  };
  constexpr std::uint64_t k = kMicroBatches, units = 4;
  const OpenSteps alone = run(1, Open::all)[0];
  const std::vector<OpenSteps> closed = run(ranks, Open::none);
  for (const Open open : {Open::none, Open::root, Open::all}) {
    CAPTURE(static_cast<int>(open));
    // Of a unit, in a step: forward and backward gather it for each micro-batch. What stays open
    // between them leaves out backward's, and what stays so after it all forwards' but the first's.
    const auto gathers = [&](bool stays) {
      return (reshard == Reshard::never ? 0 : k) + (stays ? 1 : k);
    };
    const std::uint64_t all = gathers(open != Open::none) + 3 * gathers(open == Open::all),
                        reduced = way == Way::no_sync ? units
                                  : way == Way::sync || way == Way::no_all_reduce
                                      ? units * k
                                      : (units - 1) * k + 1,
                        summed = replicas == 1               ? 0
                                 : way == Way::no_all_reduce ? units
                                                             : reduced;
    const std::vector<OpenSteps> found = open == Open::none ? closed : run(ranks, open);
    for (std::size_t rank = 0; rank < found.size(); ++rank) {
      CHECK(found[rank].gathers == std::vector(3, all));
      CHECK(found[rank].reductions == std::vector(3, reduced));
      CHECK(found[rank].all_reduces == std::vector(3, summed));
      CHECK(distance(alone.gradients, found[rank].gradients) < kRounding);
      CHECK(same_bits(found[rank].parameters, closed[rank].parameters));
    }
  }
}
