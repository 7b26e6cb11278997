// Memory is planned by running the program where nothing runs, and the plan is exact: on every
// rank, in every step, evaluation and save, live and reserved, byte by byte and owner by owner.
#include <set>

#include "runtime/param/group_part.hpp"
#include "tests/promises/memory.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Of this rank's shards, each rounded up to 256 bytes, by ShardSpec alone; what units leave alone
// is whole.
struct Padded {
  std::int64_t bytes = 0, trainable = 0;  // as they are stored; elements of those
};
Padded padded(const nn::Module& model, int rank, int ranks) {
  Padded sum;
  for (const Parameter& p : model.parameters()) {
    const bool is_whole = !p.unit();
    const ShardSpec spec{p.shape(),           is_whole ? 1 : ranks, is_whole ? 0 : rank, 0,
                         p.spec().block_rows, p.spec().extra_from,  p.spec().dim};
    const auto element = static_cast<std::int64_t>(size_bytes(p.dtype()));
    const std::int64_t bytes = (spec.chunk_numel() * element + 255) / 256 * 256;
    sum.bytes += bytes;
    if (p.trainable()) sum.trainable += bytes / 4;
  }
  return sum;
}

}  // namespace

TEST_CASE("planned memory is measured memory, on every rank and in every phase",
          "[promises][threads][fsdp2-110][fsdp2-111]") {
  GridShare share;
  for (const Cell& cell : all_cells())
    for (const int ranks : share.of({1, 2, 3, 4})) {
      INFO(cell << ", " << ranks << " ranks");
      const auto measured = on_ranks(ranks, [&](World& world) { return measure(world, cell); });
      for (int rank = 0; rank < ranks; ++rank) {
        const World plan = World::emulated(rank, ranks, {.executor = ExecutorKind::virtual_});
        const Phases planned = measure(plan, cell);
        CHECK(planned == measured[static_cast<std::size_t>(rank)]);
        for (const Phase& phase : {planned.steps[0], planned.evaluation})
          CHECK(phase.peak > phase.live);
        const int period = cell.changes ? 2 : 1;
        for (int k = 1 + period; k < kMeasuredSteps; k += period)
          CHECK(planned.steps[1] == planned.steps[k]);
        if (cell.changes && ranks > 1) CHECK(planned.steps[1] != planned.steps[2]);
      }
    }
}

TEST_CASE("between steps a rank holds 12 bytes per element of its shards, and names the rest",
          "[promises][threads]") {
  struct Held {
    std::int64_t weights, moments, gradients, slots, activations, groups;
    Padded shards;
    std::vector<std::string> owners;
  };
  GridShare share;
  for (const Cell& cell : all_cells())
    for (const int ranks : share.of({1, 2, 3, 4})) {
      INFO(cell << ", " << ranks << " ranks");
      const auto results = on_ranks(ranks, [&](World& world) {
        Trainee trainee(world, cell, 5);
        for (int k = 0; k < 2; ++k) trainee.step(k);
        world.device().synchronize();
        const int shards = ranks % cell.replicas == 0 ? ranks / cell.replicas : ranks;
        const Ledger& ledger = trainee.memory().ledger();
        const Ledger& shards_in = trainee.shard_memory().ledger();
        Held held{shards_in.live_bytes("weights"),
                  shards_in.live_bytes("moments"),
                  shards_in.live_bytes("gradients"),
                  ledger.live_bytes("gather slots") + ledger.live_bytes("gradient slots") +
                      ledger.live_bytes("shards after forward"),
                  ledger.live_bytes("activations") + ledger.live_bytes("gradients of the loss"),
                  0,
                  padded(trainee.model(), world.rank() % shards, shards),
                  {}};
        for (const auto& part : parts_of(trainee.model().parameters()))
          held.groups += part.group->trainable.empty() ? 0 : 1;
        for (const Ledger* of : {&ledger, &shards_in})
          for (const Ledger::Line& line : of->lines()) held.owners.push_back(line.owner);
        return held;
      });
      const std::set<std::string> names = {"activations",     "weights",
                                           "gradients",       "moments",
                                           "tables",          "scalars",
                                           "batch",           "staging",
                                           "gather slots",    "gradient slots",
                                           "host staging",    "replica sums",
                                           "offload staging", "unsharded gradients",
                                           "postponed sums",  "shards after forward",
                                           "buffers",         "gradients of the loss"};
      for (const Held& held : results) {
        CHECK(held.weights == held.shards.bytes);
        CHECK(held.moments == 8 * held.shards.trainable);
        // Kept gradients have an arrival count behind each group's elements: up to 64 in 256 bytes.
        CHECK(held.gradients ==
              (cell.keeps_gradients ? 4 * held.shards.trainable + 256 * held.groups : 0));
        // A block stays open; one rank alone in f32 computes with its shards.
        CHECK((held.slots > 0) == (cell.by_hand && (ranks > 1 || cell.param != f32)));
        CHECK(held.activations == 0);
        if (!cell.freezes && !cell.stored)
          CHECK(held.weights + held.moments == 12 * held.shards.trainable);
        for (const std::string& owner : held.owners) {
          INFO("owner " << owner);
          CHECK(names.contains(owner));
        }
      }
    }
}

TEST_CASE("a steady step takes no memory from the system and waits for none in the pool",
          "[promises][steady][threads]") {
  struct Pooled {
    std::uint64_t gates_before, gates_after, segments_before, segments_after;
  };
  GridShare share;
  for (const Cell& cell : all_cells())
    for (const int ranks : share.of({1, 2, 3})) {
      INFO(cell << ", " << ranks << " ranks");
      const auto results = on_ranks(ranks, [&](World& world) {
        Trainee trainee(world, cell, 5);
        for (int k = 0; k < 2; ++k) trainee.step(k);
        // Of what is offloaded there are two; else this is the same one twice.
        const Pool &pool = trainee.memory().pool(), &of_shards = trainee.shard_memory().pool();
        const auto gates = [&] { return pool.gates_fired() + of_shards.gates_fired(); };
        const auto segments = [&] { return pool.segments_taken() + of_shards.segments_taken(); };
        Pooled pooled{gates(), 0, segments(), 0};
        for (int k = 2; k < 2 + long_run(50); ++k) trainee.step(k);
        pooled.gates_after = gates();
        pooled.segments_after = segments();
        return pooled;
      });
      for (const Pooled& pooled : results) {
        CHECK(pooled.gates_after == pooled.gates_before);
        CHECK(pooled.segments_after == pooled.segments_before);
        CHECK(pooled.segments_after > 0);
      }
    }
}

TEST_CASE("the slots of gathered parameters and gradients do not grow with depth",
          "[promises][threads]") {
  const auto plan = [](std::int64_t layers, Reshard reshard) {
    const World world = World::emulated(1, 3, {.executor = ExecutorKind::virtual_});
    Trainee trainee(world, {.reshard = reshard, .layers = layers}, 5);
    return shard_plan(trainee.model());
  };
  for (const Reshard reshard : {Reshard::automatic, Reshard::always}) {
    const ShardPlan four = plan(4, reshard), twelve = plan(12, reshard);
    INFO(four.to_string() << twelve.to_string());
    CHECK(four.arena_bytes == twelve.arena_bytes);
    CHECK(four.arena_bytes > 0);
  }
  // What is never resharded is held in full, all of it.
  CHECK(plan(6, Reshard::never).arena_bytes > plan(2, Reshard::never).arena_bytes);
}
