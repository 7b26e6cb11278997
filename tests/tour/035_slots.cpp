// Lesson 35: slots.
//
// A gate (lesson 30) makes any reuse of memory safe, and costs a wait wherever an address happens
// to repeat. What sharding gathers repeats with every layer. In one slot, each gather would wait
// for the layer that has just computed; in two, taken in turn, it runs beside it:
//
//   gather    │1│     │2│     │3│              gather    │1│2│   │3│   │4│
//   compute     │  1  │ │  2  │ │ 3 ...        compute     │  1  │  2  │  3 ...
//
// So these buffers do not come from the pool. They are slots of an arena, at addresses that a plan
// has chosen: slots that are to be alive at the same time lie apart, all others may share. To let a
// gather start early, the plan counts its slot as taken from some calls earlier on:
// `prefetch_depth` of them, one by default. Using a slot first waits, on the device, for the last
// uses of whatever lay there before, and for nothing else. So a steady step fires no gate.
//
// This lesson writes the plan by hand. A model's plan is made of the takes and give-backs of the
// step before, and at first of one call of each unit. Its time is the count of takes and
// give-backs, not seconds, so it is the same however fast a rank runs. A step is what lies between
// one call of the root and the next. All ranks make the same calls, so all make the same plan. A
// slot that the plan lacks lies in a gap or in a new block. Gradients have slots, too (lesson 77).
//
// A step's peak is the most bytes of shards, gradients, moments, activations and taken slots that
// are alive at once. A dry run on the `virtual` executor counts it without touching memory (lesson
// 85).
//
// PyTorch: FSDP2's buffers come from the caching allocator. It keeps references to them until the
// stream that reads them has been waited for, and so does without `record_stream`; where they lie,
// and how many are reserved at a time, is the allocator's affair.
#include <algorithm>
#include <iostream>
#include <numeric>
#include <vector>

#include "tessera/device/device_context.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tessera/memory/arena.hpp"
#include "tessera/memory/offset_plan.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

constexpr std::int64_t kMiB = 1 << 20;
constexpr double kGatherSeconds = 2, kComputeSeconds = 3;
using Sizes = std::vector<std::int64_t>;

struct Outcome {
  double seconds;       // until the last layer has computed
  std::uint64_t races;  // operations on the same bytes that no wait puts in order
};

// Gathers each layer into its slot and computes with it. The executor runs nothing and keeps the
// time, so the result is exact; the host is done at once.
static Outcome run(const Sizes& sizes, const Sizes& offsets, bool begins_use = true) {
  const auto checker = ts::RaceChecker::make();
  const ts::Device device =
      ts::Device::cpu({.executor = ts::ExecutorKind::virtual_,
                       .cost = {.flops_per_second = 1, .wire_bytes_per_second = 1}});
  checker->watch(device.context());
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) bytes = std::max(bytes, offsets[i] + sizes[i]);
  const ts::Buffer memory = ts::Memory::of(device).allocate(bytes, ts::StreamId::gather);
  ts::Arena arena(device.context(), memory.data(), bytes);

  const auto launch = [](const ts::Stream& stream, const char* name, const ts::Slot& slot,
                         ts::AccessMode mode, const ts::Cost& cost) {
    const ts::Access access{slot.use, slot.data, slot.data + slot.bytes, mode};
    stream.launch({.name = name, .cost = cost, .accesses = {&access, 1}}, [](ts::Exec&) {});
  };
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const ts::Slot slot = arena.take(offsets[i], sizes[i], ts::kActivations);
    if (begins_use) arena.begin_use(slot, ts::StreamId::gather);  // the one wait for memory
    launch(device.gather(), "gather", slot, ts::AccessMode::write, {.wire_bytes = kGatherSeconds});
    device.compute().wait(device.gather().record());
    launch(device.compute(), "compute", slot, ts::AccessMode::read, {.flops = kComputeSeconds});
    arena.give_back(slot);  // though nothing has run yet
  }
  const double seconds = device.context().executor().seconds(ts::StreamId::compute);
  return {seconds, checker->race_count()};
}

static void two_slots_hide_the_gathers() {
  const Sizes layers(5, 4 * kMiB);
  const Outcome one = run(layers, Sizes(5, 0));
  const Outcome two = run(layers, {0, 4 * kMiB, 0, 4 * kMiB, 0});
  std::cout << "1. Five layers, gathered in " << kGatherSeconds << " s and computed in "
            << kComputeSeconds << " s: " << one.seconds << " s in one slot, " << two.seconds
            << " s in two\n";
  CHECK(one.seconds == 5 * (kGatherSeconds + kComputeSeconds));
  CHECK(two.seconds == kGatherSeconds + 5 * kComputeSeconds);
  CHECK(one.races == 0 && two.races == 0);
}

static void without_the_wait_a_layer_is_overwritten() {
  const Outcome careless = run(Sizes(5, 4 * kMiB), {0, 4 * kMiB, 0, 4 * kMiB, 0}, false);
  std::cout << "2. Without begin_use as fast, and wrong; races reported: " << careless.races
            << '\n';
  CHECK(careless.seconds == kGatherSeconds + 5 * kComputeSeconds);
  CHECK(careless.races > 0);
}

// Layers of a language model have two sizes: a table at either end, and blocks. Slots that are all
// as large as the largest layer waste what a block leaves; offsets planned from intervals do not.
static void slots_of_many_sizes() {
  const Sizes layers = {8 * kMiB, 2 * kMiB, 2 * kMiB, 2 * kMiB, 8 * kMiB};
  std::vector<ts::Interval> alive;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto call = static_cast<std::int64_t>(i);
    alive.push_back({.bytes = layers[i], .begin = call - 1, .end = call + 1});  // one call ahead
  }
  const ts::PlacedIntervals plan = ts::place(alive);  // best fit gives each its address
  const std::int64_t sum = std::accumulate(layers.begin(), layers.end(), std::int64_t{0});
  std::cout << "3. Layers of 8, 2, 2, 2 and 8 MiB: " << plan.bytes / kMiB
            << " MiB, where two equal "
            << "slots take 16 and a slot each " << sum / kMiB << ". At";
  for (const std::int64_t offset : plan.offsets) std::cout << ' ' << offset / kMiB;
  std::cout << '\n';
  CHECK(plan.bytes == ts::most_alive(alive));  // here: no plan can be smaller
  CHECK(plan.bytes == 10 * kMiB);
  const Outcome planned = run(layers, plan.offsets);
  CHECK(planned.seconds == kGatherSeconds + 5 * kComputeSeconds);
  CHECK(planned.races == 0);
}

int main() {
  two_slots_hide_the_gathers();
  without_the_wait_a_layer_is_overwritten();
  slots_of_many_sizes();
}
