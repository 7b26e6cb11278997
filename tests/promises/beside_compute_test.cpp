// What runs beside compute, on the virtual clock: gathers that run ahead, reductions, and what
// neither of them waits for.
#include <algorithm>
#include <memory>
#include <vector>

#include "tessera/nn/sequential.hpp"
#include "tests/promises/timed_step.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE(
    "where communication is cheaper than compute only the first gathers and the last "
    "reductions are exposed",
    "[promises]") {
  for (const Cell& cell : {Cell{}, Cell{.recomputes = true}, Cell{.param = bf16}})
    for (const double ratio : {0.25, 0.5, 0.9}) {
      // Recomputing makes a step's compute 4/3 as long, so that forward alone is as dear as its
      // gathers at 3/4.
      if (cell.recomputes && ratio > 0.75) continue;
      INFO(cell << ", ratio " << ratio);
      const TimedStep step = run_timed(cell, machine_for(cell, ratio));
      const auto gathers = step.all(StreamId::gather, "all_gather "),
                 first_block = step.all(StreamId::gather, "layers.0"),
                 last_block = step.all(StreamId::reduce, "layers.0");
      REQUIRE(gathers.size() == 19);  // root, embedding and head once; 8 blocks twice
      REQUIRE(first_block == std::vector<std::size_t>{gathers[2], gathers[18]});
      REQUIRE(last_block.size() == 1);
      // Looking up embeddings hides nothing: the first block's gather is exposed with those before
      // it, and its reduction with that of the embedding, which backward reaches last.
      const double first = step.first_reader(gathers[2]).begin,
                   last = step.operations[last_block[0]].begin;
      CHECK(first == Approx(step.operations[gathers[2]].end));
      CHECK(step.idle(first, last) == 0);  // an operation begins at the very time another ends
      // Run ahead: the gather of a unit begins before compute gets to the unit before it.
      for (std::size_t k = 2; k + 1 < gathers.size(); ++k)
        CHECK(step.begin_of_gather(gathers[k + 1]) <= step.first_reader(gathers[k]).begin);
      // Beside compute: all others end before compute does.
      for (const std::size_t r : step.all(StreamId::reduce, "reduce_scatter "))
        if (r < last_block[0]) CHECK(step.operations[r].end <= last);
    }
}

TEST_CASE("as many reductions are in flight, and gathers ahead, as the options say",
          "[promises][fsdp2-063][fsdp2-064]") {
  for (const int count : {1, 2, 3}) {
    INFO(count << " in flight");
    // Without gathers in backward a slow wire is all for reductions, which pile up.
    const Cell cell{.reshard = Reshard::never, .reductions_in_flight = count};
    const TimedStep step = run_timed(cell, machine_for(cell, 3));
    const auto reductions = step.all(StreamId::reduce, ".layers.");  // all of one size
    std::ptrdiff_t most = 0;
    for (const std::size_t r : reductions) {
      const double from = step.filled_from(r);
      most = std::max(most, std::count_if(reductions.begin(), reductions.end(), [&](std::size_t o) {
                        return o < r && step.operations[o].end > from * (1 + 1e-12);
                      }));
    }
    CHECK(most >= count);
  }
  for (const int depth : {1, 2, 3}) {
    INFO("prefetch depth " << depth);
    // On a fast wire gathers are as far ahead as slots let them be.
    const Cell cell{.prefetch_depth = depth};
    const TimedStep step = run_timed(cell, machine_for(cell, 0.1));
    const auto gathers = step.all(StreamId::gather, ".layers.");
    std::ptrdiff_t most = 0;
    for (std::size_t k = 0; k < gathers.size(); ++k) {
      // While a block is computed, but for its last operation, nobody gives a slot back.
      const double from = step.first_reader(gathers[k]).begin * (1 + 1e-12);
      most = std::max(most, std::count_if(gathers.begin(), gathers.end(), [&](std::size_t g) {
                        return g > gathers[k] && step.begin_of_gather(g) < from;
                      }));
    }
    CHECK(most >= depth);
  }
}

TEST_CASE("reductions run beside gathers", "[promises][fsdp2-114]") {
  // Where the wire is what a step takes, one communicator would take all of it in a row.
  const Cell cell{.reshard = Reshard::always};
  for (const std::int64_t piece_bytes : {kWhole, kMatrix}) {
    const TimedStep step = run_timed(cell, machine_for(cell, 3), piece_bytes);
    CHECK(step.seconds < 0.8 * step.wire);
  }
}

TEST_CASE("a gather waits for its unit's update, not for what is computed before its call",
          "[promises][fsdp2-113]") {
  constexpr std::int64_t kWidth = 2048;
  // A product takes 17 ms, the gather of a unit and its reduction 10 ms each.
  const CostModel cost{
      .flops_per_second = 1e12, .bytes_per_second = 1e15, .wire_bytes_per_second = 1.7e9};
  const RaceCheck check;
  const World world =
      World::emulated(1, 2, check({.executor = ExecutorKind::virtual_, .cost = cost}));
  nn::Linear heavy(kWidth, kWidth), unit(kWidth, kWidth);  // heavy is no unit's
  fully_shard(unit, {.mesh = DeviceMesh::flat(world)});
  for (nn::Linear* const layer : {&heavy, &unit}) nn::init(*layer, {1}, world.device());
  optim::SGD of_heavy(heavy.parameters(), {.lr = 0.1}), of_unit(unit.parameters(), {.lr = 0.1});
  const Tensor x = Tensor::zeros({kWidth, kWidth}, f32, world.device());
  Recorder recorder(world.device(), cost);
  for (int step = 0; step < 5; ++step) {
    mean_square(unit(heavy(x))).backward();
    for (optim::SGD* const optimizer : {&of_heavy, &of_unit}) {
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  double compute = 0, end = 0, wire = 0;
  for (const Operation& op : recorder.operations) {
    (op.stream == StreamId::compute ? compute : wire) += op.seconds;
    end = std::max(end, op.end);
  }
  const double begin = recorder.operations.front().begin;
  CHECK(wire > 0.1 * compute);
  CHECK(end - begin < 1.001 * compute + wire / 10);  // hidden but for one, of the first call
}

TEST_CASE("what backward does not read is not gathered again, and nothing waits for it",
          "[promises]") {
  constexpr std::int64_t kWidth = 2048;
  // A product takes 17 ms, the gather of a unit 84 ms. Only what backward reaches last is trained,
  // so that no other reduction hides its gather.
  const CostModel cost{
      .flops_per_second = 1e12, .bytes_per_second = 1e15, .wire_bytes_per_second = 2e8};
  struct Shift final : nn::Module {
    Shift() { register_parameter("by", by); }
    Tensor operator()(const Tensor& x) {
      return call([&] { return x + by.value(); });
    }
    Parameter by{{kWidth, kWidth}, Initializer::normal(0, 1)};
  };
  struct Took {
    double seconds = 0, gather = 0;
    std::ptrdiff_t gathers = 0;
  };
  const auto run = [&](bool unshards) {
    const RaceCheck check;
    const World world =
        World::emulated(1, 2, check({.executor = ExecutorKind::virtual_, .cost = cost}));
    nn::Sequential model;
    Shift& shift = model.push_back(std::make_unique<Shift>());
    for (int k = 0; k < 2; ++k) model.push_back(std::make_unique<nn::Linear>(kWidth, kWidth));
    model.apply<nn::Linear>([](nn::Linear& layer) {
      for (Parameter p : layer.parameters()) p.freeze();
    });
    const ShardOptions options{.mesh = DeviceMesh::flat(world),
                               .reshard_after_forward = Reshard::always,
                               .piece_bytes = kWhole};
    fully_shard(shift, options);
    model.apply<nn::Linear>([&](nn::Linear& layer) { fully_shard(layer, options); });
    fully_shard(model, options);
    nn::init(model, {1}, world.device());
    set_unshard_in_backward(shift, unshards);
    const Tensor x = Tensor::zeros({kWidth, kWidth}, f32, world.device());
    Took took;
    for (int k = 0; k < 3; ++k) {  // the last is a steady one
      world.device().synchronize();
      const double start = world.device().context().executor().host_seconds();
      Recorder recorder(world.device(), cost);
      mean_square(model(x)).backward();
      world.device().synchronize();
      took.seconds = world.device().context().executor().host_seconds() - start;
      took.gathers = 0;
      for (const Operation& op : recorder.operations)
        if (op.is("all_gather ")) ++took.gathers, took.gather = op.seconds;
    }
    return took;
  };
  const Took with = run(true), without = run(false);
  CHECK(with.gathers == 6);
  CHECK(without.gathers == 5);
  // Backward of the layer behind it, one product, hides as much of the gather; all else takes less
  // than 1 %.
  const double product = 2. * kWidth * kWidth * kWidth / cost.flops_per_second;
  CHECK(with.seconds - without.seconds == Approx(with.gather - product).epsilon(0.01));
}
