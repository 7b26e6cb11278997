// N ranks train as one rank does, whatever the options; and what they compute has the same bits on
// every executor, schedule and number of threads.
#include "tests/promises/support.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr int kSteps = 6;

}  // namespace

// Bounds. N ranks differ from one in the order in which 216 tokens' gradients are summed, and
// nothing else: relative to a gradient's norm, about 1, a few u = 6e-8, up to ten times as much
// where terms cancel, 1e-6 in all. An update lr m / (sqrt(v) + eps) changes by at most 3 lr / eps =
// 3 times what its gradient does, also where that is all rounding (with eps = 1e-8 such an element
// would move by lr the other way). Parameters are then 3e-6 apart after a step, 2e-5 after six. Of
// a thousand elements that are off in directions of their own a thirtieth counts along the slope,
// so a loss is off by 1e-6. Allowed are 1e-5 on a loss and 1e-4 on a norm, the promise of
// tessera-train. The first gradients are of equal parameters, so they, all together, are 1e-6 of
// their norm apart. A rank's sample left out or a factor of N moves the norm by 1e-2 and more.
TEST_CASE("N ranks train as one does, in f32",
          "[promises][threads][fsdp2-032][fsdp2-036][fsdp2-038][fsdp2-042][fsdp2-046]") {
  const std::uint64_t seed = fresh_seed();
  GridShare share;
  for (const Cell& cell : cells()) {
    const std::vector<int> compared = share.of({2, 3, 4});
    if (compared.empty()) continue;
    INFO(cell << ", seed " << seed);
    const Trained one = train(1, {.threads = 1}, cell, seed, kSteps);
    CHECK(one.losses.back() < one.losses.front());
    for (const int ranks : compared) {
      INFO(ranks << " ranks");
      const Trained many = train(ranks, {.threads = 1}, cell, seed, kSteps);
      CHECK(worst(one.losses, many.losses) < 1e-5);
      CHECK(worst(one.norms, many.norms) < 1e-4 * largest(one.norms));
      CHECK(distance_of(one.gradients, many.gradients) < 1e-6 * one.norms[0]);
    }
  }
}

// bf16 keeps 8 bits. The first losses differ by the f32 sums alone, since parameters are equal and
// a sample's arithmetic is that of one rank: 1e-5 as above. Gradients are products in bf16, rounded
// by 2^-8 at each of some 30 steps in directions of their own, so they differ by up to 2^-8
// sqrt(30) = 2e-2 of the norm, parameters by 6e-2 after a step, and a loss by a thirtieth of that:
// 2e-3, and 1e-2 after six steps. The first norms differ no more than the first gradients do, by
// 2e-2 of them; later ones by those of gradients and, ten times as far as a loss as above, of
// parameters: 1e-1 of them. f16 rounds by 2^-11, an eighth of that, as long as values are
// above 2^-14: gradients of a loss over 216 tokens are 1e-3 and more where they count, and below
// 2^-14 an element is off by 2^-25 = 3e-8 at most. Beside f32 the logits are off too, by 15
// roundings of at most 0.5, 3e-2; with the 1e-2 of the updates less than 2 % of a loss of 2.5.
TEST_CASE("N ranks train as one does, in bf16 and f16, and near f32",
          "[promises][threads][fsdp2-084][fsdp2-085][fsdp2-088]") {
  const std::uint64_t seed = fresh_seed();
  GridShare share;
  for (const Cell& cell : narrow_cells()) {
    const std::vector<int> compared = share.of({2, 3, 4});
    if (compared.empty()) continue;
    INFO(cell << ", seed " << seed);
    Cell wide = cell;
    wide.param = wide.reduce = f32;
    const Trained one = train(1, {.threads = 1}, cell, seed, kSteps),
                  full = train(1, {.threads = 1}, wide, seed, kSteps);
    CHECK(worst(one.losses, full.losses) < 0.02 * largest(full.losses));
    CHECK(worst(one.losses, full.losses) > 0);
    for (const int ranks : compared) {
      INFO(ranks << " ranks");
      const Trained many = train(ranks, {.threads = 1}, cell, seed, kSteps);
      CHECK(std::abs(one.losses[0] - many.losses[0]) < 1e-5);
      CHECK(worst(one.losses, many.losses) < 1e-2);
      CHECK(distance_of(one.gradients, many.gradients) < 2e-2 * one.norms[0]);
      CHECK(std::abs(one.norms[0] - many.norms[0]) < 2e-2 * one.norms[0]);
      CHECK(worst(one.norms, many.norms) < 1e-1 * largest(one.norms));
    }
  }
}

TEST_CASE("an MLP with empty shards trains as one rank does", "[promises][threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  // Widths of 1, 2 and 3: on 4 ranks most units have ranks that own nothing of them.
  const auto losses = [&](int ranks, Reshard reshard) {
    return on_ranks(ranks, [&](World& world) {
      Stack model({5, 3, 1, 2});
      model.shard({.mesh = DeviceMesh::flat(world), .reshard_after_forward = reshard});
      model.materialize(world.device());
      nn::init(model, {seed});
      optim::AdamW optimizer(model.parameters(), {.lr = 1e-2, .eps = 1e-2});
      std::vector<float> out;
      for (int k = 0; k < kSteps; ++k) {
        const std::int64_t rows = 12 / ranks;
        const Tensor loss =
            mean_square(model(rows_of(seed, world.rank() * rows, rows, 5, world.device())));
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        out.push_back(static_cast<float>(world.sum(loss.item()) / ranks));
      }
      return out;
    })[0];
  };
  const std::vector<float> one = losses(1, Reshard::automatic);
  CHECK(one.back() < one.front());
  for (const int ranks : {2, 3, 4})
    for (const Reshard reshard : {Reshard::automatic, Reshard::always, Reshard::never})
      CHECK(worst(one, losses(ranks, reshard)) < 1e-5);
}

TEST_CASE("bits depend on the number of ranks only", "[promises][threads][fsdp2-032][fsdp2-037]") {
  const std::uint64_t seed = fresh_seed();
  GridShare share;
  for (const Cell& cell : all_cells())
    for (const int ranks : share.of(worlds_of(cell))) {
      INFO(cell << ", " << ranks << " ranks, seed " << seed);
      const Trained reference = train(ranks, {.threads = 1}, cell, seed, 2);
      const WorldOptions others[] = {{.threads = 3},
                                     {.executor = ExecutorKind::inlined, .threads = 1},
                                     {.executor = ExecutorKind::inlined, .threads = 2},
                                     {.executor = testing::shuffled(seed), .threads = 1},
                                     {.executor = testing::shuffled(seed + 1), .threads = 2}};
      for (const WorldOptions& options : others) {
        INFO(name(options.executor) << ", " << options.threads << " threads");
        CHECK(same_bits(reference, train(ranks, options, cell, seed, 2)));
      }
    }
}
