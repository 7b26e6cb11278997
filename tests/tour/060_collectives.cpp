// Lesson 60: collectives, on raw buffers.
//
// A world has ranks; here they are four threads. Sharding needs two collectives. Before a layer
// runs, every rank holds a quarter of its parameters and needs them all; after its backward, every
// rank holds gradients of all parameters and needs the sum of its own quarter:
//
//   all_gather         rank 0  [a . . .]        [a b c d]
//                      rank 1  [. b . .]   ──▶  [a b c d]     in place: a rank's own chunk is there
//                      ...                      ...
//   reduce_scatter     rank 0  [a b c d]        [Σa]
//                      rank 1  [a b c d]   ──▶  [Σb]          summed in rank order, always
//                      ...                      ...
//
// Peers read a rank's send side directly, so it lies in symmetric memory: the same offset on every
// rank. A collective is work on a stream like any other, ordered by events. It begins when all
// ranks' inputs are ready, and ends when nobody reads them any more.
#include <array>
#include <atomic>
#include <cstdio>

#include "tessera/comm/world.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

constexpr int kRanks = 4;
constexpr std::int64_t kChunk = 2;  // elements of each rank's shard

static std::array<std::array<float, kChunk>, kRanks> shard_gradients;  // for the host to print

static void train_step(ts::World& world) {
  const int rank = world.rank();
  const auto memory = world.allocate_symmetric(2 * kRanks * kChunk * sizeof(float));
  auto* const weights = reinterpret_cast<float*>(memory->data());  // [kRanks][kChunk]
  float* const gradients = weights + kRanks * kChunk;              // [kRanks][kChunk]
  auto& shard_gradient = shard_gradients[static_cast<std::size_t>(rank)];
  ts::LastUse use, shard_use;
  const ts::Access all[] = {{&use, weights, gradients + kRanks * kChunk, ts::AccessMode::write}};
  const ts::Access both[] = {
      all[0],
      {&shard_use, shard_gradient.data(), shard_gradient.data() + kChunk, ts::AccessMode::write}};
  const ts::Stream compute = world.device().compute(), gather = world.device().gather(),
                   reduce = world.device().reduce();

  // Each rank writes its shard where the gathered weights will have it.
  float* const mine = weights + rank * kChunk;
  compute.launch({.name = "write shard", .accesses = all}, [mine, rank](ts::Exec&) {
    for (std::int64_t i = 0; i < kChunk; ++i) mine[i] = static_cast<float>(10 * rank + i);
  });
  gather.wait(compute.record());  // enter
  world.gather().submit(
      {.send = mine, .recv = weights, .count = kChunk, .kind = ts::CollectiveKind::all_gather},
      "gather weights", all);
  compute.wait(gather.record());  // leave

  // A backward of sorts: this rank's batch weighs every parameter with (rank + 1).
  compute.launch({.name = "backward", .accesses = all}, [weights, gradients, rank](ts::Exec&) {
    for (std::int64_t i = 0; i < kRanks * kChunk; ++i)
      gradients[i] = weights[i] * static_cast<float>(rank + 1);
  });
  reduce.wait(compute.record());
  world.reduce().submit({.send = gradients,
                         .recv = shard_gradient.data(),
                         .count = kChunk,
                         .kind = ts::CollectiveKind::reduce_scatter},
                        "reduce gradients", both);
  world.device().block(reduce.record());  // the only place where the host sleeps
  CHECK(world.gather().submitted() == 1 && world.reduce().submitted() == 1);
}

// Ranks that disagree do not hang and do not compute nonsense: every one gets the same error.
static void ranks_must_agree() {
  std::atomic<int> told = 0;
  try {
    ts::run_local(2, {}, [&](ts::World& world) {
      float value = 1;
      const auto kind =
          world.rank() == 0 ? ts::CollectiveKind::all_reduce : ts::CollectiveKind::broadcast;
      world.control().submit({.send = &value, .recv = &value, .count = 1, .kind = kind}, "loss",
                             {});
      try {
        world.device().synchronize();
      } catch (const ts::CommError&) {
        ++told;
        throw;
      }
    });
  } catch (const ts::CommError& error) {
    std::printf("2. Ranks that disagree are told:\n   %s\n", error.what());
  }
  CHECK(told == 2);
}

int main() {
  ts::run_local(kRanks, {}, train_step);
  std::printf(
      "1. Four ranks gathered weights 10 r + i and summed gradients weighed 1 + 2 + 3 + 4:\n");
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    const auto& g = shard_gradients[rank];
    std::printf("   rank %zu holds [%g %g]\n", rank, g[0], g[1]);
    for (std::size_t i = 0; i < kChunk; ++i)
      CHECK(g[i] == 10 * static_cast<float>(10 * rank + i));  // small integers: exact in f32
  }
  ranks_must_agree();

  ts::run_local(3, {}, [](ts::World& world) {
    const double sum = world.sum(0.1 * world.rank());  // the same bits on every rank
    CHECK(sum == 0.0 + 0.1 * 1 + 0.1 * 2);
    if (world.rank() == 0) std::printf("3. Three ranks agree that the sum is %.17g\n", sum);
  });
}
