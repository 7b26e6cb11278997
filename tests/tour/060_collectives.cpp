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
// A collective is work on a stream like any other. So it has an edge on each side, one before it
// and one behind it:
//
//   compute   ── write shard ── record ┐                              ┌ wait ── backward
//   gather                             └ wait ── all_gather ── record ┘
//
// Peers read the send side where it lies, in symmetric memory (what is small is copied there): the
// same offset on every rank. It begins when all inputs are ready, and ends on a rank when no peer
// reads that rank's bytes any more. So the event behind a collective covers its peers' reads, too,
// and a gate needs no word of a peer.
//
// PyTorch: all_gather_into_tensor and reduce_scatter_tensor, on a stream of NCCL; the call makes
// the edge before, from the current stream, and `Work.wait()` the one behind. Ranks that disagree
// hang until a watchdog ends the job, unless TORCH_DISTRIBUTED_DEBUG=DETAIL compares all calls.
#include <array>
#include <atomic>
#include <iomanip>
#include <iostream>

#include "tessera/comm/world.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;
using ts::AccessMode;

constexpr int kRanks = 4;
constexpr std::int64_t kChunk = 2;  // elements of each rank's shard
constexpr std::int64_t kAll = kRanks * kChunk;

using Chunk = std::array<float, kChunk>;

// What one rank works on, and the last use of each allocation, which every launch brings up to
// date. An operation declares all bytes that it may touch.
struct Memory {
  explicit Memory(const ts::World& world)
      : symmetric(world.allocate_symmetric(2 * kAll * sizeof(float))),
        weights(reinterpret_cast<float*>(symmetric->data())),
        gradients(weights + kAll) {}
  ts::Access both() { return {&use, weights, gradients + kAll, AccessMode::write}; }
  ts::Access shard() { return {&shard_use, sum.data(), sum.data() + kChunk, AccessMode::write}; }

  std::shared_ptr<ts::SymmetricMemory> symmetric;
  float* weights;    // [kRanks][kChunk]
  float* gradients;  // [kRanks][kChunk]
  Chunk sum{};       // this rank's chunk of the gradients, over all ranks
  ts::LastUse use, shard_use;
};

// Each rank writes its shard where the gathered weights will have it.
static void write_shard(const ts::World& world, Memory& memory) {
  const int rank = world.rank();
  float* const mine = memory.weights + rank * kChunk;
  const ts::Access all[] = {memory.both()};
  world.device().compute().launch({.name = "write shard", .accesses = all}, [=](ts::Exec&) {
    for (std::int64_t i = 0; i < kChunk; ++i) mine[i] = static_cast<float>(10 * rank + i);
  });
}

// The edge before: the gather stream must not read the shard before compute has written it. The
// edge behind: compute must not read the weights before the peers' chunks are there, and must not
// overwrite its own while a peer still reads it. Both are waits on the device; the host goes on at
// once.
static void gather_weights(const ts::World& world, Memory& memory) {
  const ts::Stream compute = world.device().compute(), gather = world.device().gather();
  const ts::Access all[] = {memory.both()};
  gather.wait(compute.record());  // before
  world.gather().submit({.send = memory.weights + world.rank() * kChunk,
                         .recv = memory.weights,
                         .count = kChunk,
                         .kind = ts::CollectiveKind::all_gather},
                        "gather weights", all);
  compute.wait(gather.record());  // behind
}

// A backward of sorts: this rank's batch weighs every parameter with (rank + 1).
static void backward(const ts::World& world, Memory& memory) {
  const auto factor = static_cast<float>(world.rank() + 1);
  const ts::Access all[] = {memory.both()};
  world.device().compute().launch(
      {.name = "backward", .accesses = all},
      [=, weights = memory.weights, gradients = memory.gradients](ts::Exec&) {
        for (std::int64_t i = 0; i < kAll; ++i) gradients[i] = weights[i] * factor;
      });
}

// The same edge before. Behind, the host itself wants the result, so it blocks and no stream waits.
static void reduce_gradients(const ts::World& world, Memory& memory) {
  const ts::Stream compute = world.device().compute(), reduce = world.device().reduce();
  const ts::Access all[] = {memory.both(), memory.shard()};
  reduce.wait(compute.record());  // before
  world.reduce().submit({.send = memory.gradients,
                         .recv = memory.sum.data(),
                         .count = kChunk,
                         .kind = ts::CollectiveKind::reduce_scatter},
                        "reduce gradients", all);
  world.device().block(reduce.record());
}

static void one_step() {
  std::array<Chunk, kRanks> sums{};  // for the host to print
  ts::run_local(kRanks, {}, [&](ts::World& world) {
    Memory memory(world);
    write_shard(world, memory);
    gather_weights(world, memory);
    backward(world, memory);
    reduce_gradients(world, memory);
    CHECK(world.gather().submitted() == 1 && world.reduce().submitted() == 1);
    sums[static_cast<std::size_t>(world.rank())] = memory.sum;
  });
  std::cout << "1. Four ranks gathered weights 10 r + i and summed gradients, 1 to 4 times that:\n";
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    std::cout << "   rank " << rank << " holds " << sums[rank][0] << ' ' << sums[rank][1] << '\n';
    for (std::size_t i = 0; i < kChunk; ++i)  // small integers: exact in f32
      CHECK(sums[rank][i] == 10 * static_cast<float>(10 * rank + i));
  }
}

// Ranks that disagree do not hang and do not compute nonsense: every one gets the same error.
static void ranks_must_agree() {
  std::atomic<int> told = 0;
  try {
    ts::run_local(2, {}, [&](ts::World& world) {
      float value = 1;
      const auto kind =
          world.rank() == 0 ? ts::CollectiveKind::all_reduce : ts::CollectiveKind::broadcast;
      world.control().submit({.send = &value, .recv = &value, .count = 1, .kind = kind}, "sum", {});
      try {
        world.device().synchronize();
      } catch (const ts::CommError&) {
        ++told;
        throw;
      }
    });
  } catch (const ts::CommError& error) {
    std::cout << "2. Ranks that disagree are told:\n   " << error.what() << '\n';
  }
  CHECK(told == 2);
}

// In rank order on every rank, so there is one answer, and it has the same bits everywhere.
static void a_sum_has_one_value() {
  ts::run_local(3, {}, [](ts::World& world) {
    const double sum = world.sum(0.1 * world.rank());
    CHECK(sum == 0.0 + 0.1 * 1 + 0.1 * 2);
    if (world.rank() == 0)
      std::cout << "3. Three ranks agree that the sum is " << std::setprecision(17) << sum << '\n';
  });
}

int main() {
  one_step();
  ranks_must_agree();
  a_sum_has_one_value();
}
