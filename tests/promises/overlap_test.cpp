// How long a step takes on the virtual clock, in every way to train, is held to the computed
// minimum of longest_path.hpp.
//
// Between two micro-batches the first gathers of the next find every slot in use until backward
// ends, so that they are exposed once more: there the minimum is that of the planned memory. So it
// is for lists of modules in pieces, which are reduced together, where backward has come back
// through the first module, and so only take memory from each other. And so it is where parts are
// frozen, where units differ in what they gather and reduce.
#include <algorithm>
#include <vector>

#include "tests/promises/timed_step.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

std::vector<Cell> overlap_cells() {
  return {{},
          {.recomputes = true},
          {.recomputes = true, .selectively = true},
          {.reshard = Reshard::never},
          {.reshard = Reshard::to(2)},
          {.replicas = 2},
          {.replicas = 8},
          {.reshard = Reshard::always},
          {.reshard = Reshard::always, .recomputes = true},
          {.param = bf16},
          {.tied = true, .param = bf16},
          {.micro_batches = 2},
          {.micro_batches = 2, .prefetch_depth = 2},
          {.micro_batches = 2, .accumulation = Accumulation::unsharded},
          {.micro_batches = 2, .replicas = 2, .accumulation = Accumulation::in_replicas},
          {.param = bf16, .output = f32},
          {.prefetch_depth = 2, .reductions_in_flight = 2},
          {.encodes = true},
          {.ragged = true},
          {.lists = true},
          {.by_hand = true},
          {.changes = true},
          {.inner = true, .backwards = true},
          {.recomputes = true, .every = 2},
          {.freezes = true},
          {.reshard = Reshard::always, .prefetch_depth = 2},
          {.reshard = Reshard::always, .freezes = true, .prefetch_depth = 2},
          {.reshard = Reshard::always, .freezes = true, .stored = e4m3},
          {.param = bf16, .by_hand = true, .stored = bf16, .ignores = true},
          {.param = f16, .scales_loss = true},
          {.param = f16, .reduce = f16, .scales_loss = true},
          {.param = bf16, .reduce = bf16},
          {.orthogonalises = true},
          {.offload = Offload::cpu},
          {.prefetch_depth = 2, .offload = Offload::cpu}};
}

}  // namespace

TEST_CASE("a step takes at most 1.01 of the computed minimum", "[promises][fsdp2-112]") {
  for (const Cell& cell : overlap_cells())
    for (const double ratio : {0.25, 0.5, 0.9, 1.5, 3.}) {
      const TimedStep step = run_timed(cell, machine_for(cell, ratio));
      INFO(cell << ", ratio " << ratio << ": " << step.seconds << " s, minimum " << step.minimum
                << " s, compute " << step.compute << " s, wire " << step.wire << " s");
      // All times are the cost model's, the same in every run. The wire's have a part that does not
      // depend on its speed, the casts in front of gathers: less than 1 %; encodings, copies to the
      // host and its update, and of replicas alone copies of gradients: less than 2 %. Gradients of
      // what units leave alone are summed on compute: the wire that was measured was slow, so that
      // compute seemed 7 % longer.
      const bool offloads = cell.offload == Offload::cpu, replicates = cell.replicas == 8;
      const double part = cell.ignores                             ? 0.08
                          : cell.encodes || offloads || replicates ? 0.02
                                                                   : 0.01;
      CHECK(step.wire / step.compute == Approx(ratio).epsilon(part));
      // The same times, some thousand, summed in another order.
      CHECK(step.seconds >= step.minimum * (1 - 1e-9));
      // On the one stream to and from the host the copy of the next gather comes behind that of a
      // reduction, which waits for the wire, unless gathers are two ahead. Replicas alone have no
      // gather that hides that the first reduction, the head's, waits for the second of its
      // products too, which is 1.1 % of the step.
      const double most = offloads && cell.prefetch_depth == 1 ? 1.03 : replicates ? 1.012 : 1.01;
      CHECK(step.seconds <= most * step.minimum);
    }
}

// The one combination that misses 1.01, by 0.13 %: where the wire takes 1.5 times as long as
// compute, compute waits for the last block's gather when backward enters the block, whose first
// product, a weight's gradient, reads nothing of it.
TEST_CASE("with frozen parts that are gathered twice a step takes at most 1.012 of the minimum",
          "[promises]") {
  for (const double ratio : {0.25, 0.5, 0.9, 1.5, 3.}) {
    const Cell cell{.reshard = Reshard::always, .freezes = true};
    const TimedStep step = run_timed(cell, machine_for(cell, ratio));
    INFO(cell << ", ratio " << ratio << ": " << step.seconds << " s, minimum " << step.minimum);
    CHECK(step.seconds <= 1.012 * step.minimum);
  }
}

// Backward prefetches the units of one root: the gather of the next root begins when backward
// enters it.
TEST_CASE("where each part is a root a step takes at most 1.04 of the minimum", "[promises]") {
  for (const Cell& cell :
       {Cell{.roots = true}, Cell{.reshard = Reshard::always, .param = bf16, .roots = true}})
    for (const double ratio : {0.25, 0.5, 0.9, 1.5, 3.}) {
      const TimedStep step = run_timed(cell, machine_for(cell, ratio));
      INFO(cell << ", ratio " << ratio << ": " << step.seconds << " s, minimum " << step.minimum);
      CHECK(step.seconds >= step.minimum * (1 - 1e-9));
      CHECK(step.seconds <= 1.04 * step.minimum);
    }
}

// A block that is opened before the root's call takes its slot, and its place on the wire, from
// what is called first.
TEST_CASE("with a block that is opened by hand a step takes at most 1.04 of the minimum",
          "[promises]") {
  for (const Cell& cell : {Cell{}, Cell{.recomputes = true}, Cell{.by_hand = true}})
    for (const double ratio : {0.25, 0.5, 0.9, 1.5, 3.}) {
      const TimedStep step = run_timed(cell, machine_for(cell, ratio), kWhole, Opens::by_hand);
      INFO(cell << ", ratio " << ratio << ": " << step.seconds << " s, minimum " << step.minimum);
      CHECK(step.seconds >= step.minimum * (1 - 1e-9));
      CHECK(step.seconds <= 1.04 * step.minimum);
    }
}

TEST_CASE("a step in one dimension of a mesh takes what it takes in a world of these ranks",
          "[promises]") {
  for (const Cell& cell : {Cell{}, Cell{.reshard = Reshard::always, .replicas = 2}}) {
    const CostModel cost = machine_for(cell, 1.5);
    const TimedStep alone = run_timed(cell, cost),
                    beside = run_timed(cell, cost, kWhole, Opens::by_calls, 2);
    CHECK(beside.seconds == Approx(alone.seconds).epsilon(1e-9));
    CHECK(beside.plan.arena_bytes == alone.plan.arena_bytes);
  }
}

// In pieces reductions begin earlier, so that the computed minimum is lower. It is not quite
// reached: fewer gradients are in flight. What is promised of whole buffers holds, but for slices
// of the head that are gathered twice: of a whole one the only slice stays from forward to
// backward. Pieces of a block that calls another unit wait for its end, so that only the head's
// begin earlier. A piece is a matrix of the model, in the dtype in which it is reduced.
TEST_CASE("a step in pieces takes at most 1.01 of the minimum of one with whole gradient buffers",
          "[promises]") {
  for (const Cell& cell : overlap_cells())
    for (const double ratio : {0.25, 0.5, 0.9, 1.5, 3.}) {
      const CostModel cost = machine_for(cell, ratio);
      const TimedStep whole = run_timed(cell, cost),
                      step = run_timed(cell, cost, kMatrix * size_bytes(cell.reduce) / 4);
      INFO(cell << ", ratio " << ratio << ": " << step.seconds << " s, minimum " << step.minimum
                << " s; whole " << whole.seconds << " s, minimum " << whole.minimum << " s");
      CHECK(step.seconds >= step.minimum * (1 - 1e-9));
      const double again = std::max(0.0, step.wire - whole.wire);
      const double most = cell.inner ? 1.02 : cell.replicas == 8 ? 1.012 : 1.01;
      if (!cell.lists) CHECK(step.seconds <= most * whole.minimum + again);
      CHECK(step.seconds <= (cell.lists ? 1.01 : cell.inner ? 1.07 : 1.05) * step.minimum);
      CHECK(step.plan.arena_bytes < whole.plan.arena_bytes);
    }
}
