// Races that reached users of other systems, told again as small programs of ours. Each is flagged
// as it was, and silent as it was repaired; and where our pool or slots would have healed it, that
// is shown, too. F13 is no race but a mismatch of collectives, F15 no race but memory that grows.
//
// Sources: pytorch 180665 (F1), 180666 (F2), 181218 (F3), ROCm/pytorch 3501 (F4), pytorch 188655
// (F5), Megatron-LM 6187 (F6), 5788 (F7), pytorch 195281 (F8), 160481 (F9), Torch-FL 62 (F10),
// pytorch 178142 (F11), torchrec 4231 (F12), Megatron-LM 2252 (F13), fairscale 780 (F14),
// pytorch 179443 (F15).
#include <array>
#include <barrier>
#include <optional>
#include <vector>

#include "runtime/device/testing.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tessera/memory/arena.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

constexpr AccessMode R = AccessMode::read, W = AccessMode::write;

// A rank under a checker, with its streams, memory and some bytes of the program's own.
struct Rank {
  explicit Rank(std::shared_ptr<RaceChecker> c = RaceChecker::make(), int rank = 0)
      : checker(std::move(c)),
        device(Device::cpu({.executor = ExecutorKind::inlined, .rank = rank})) {
    checker->watch(device.context());
  }
  void run(StreamId stream, const char* name, LastUse& use, const void* data, std::size_t bytes,
           AccessMode mode) {
    const Access access{&use, data, static_cast<const std::byte*>(data) + bytes, mode};
    device.stream(stream).launch({.name = name, .accesses = {&access, 1}}, [](Exec&) {});
  }
  void run(StreamId stream, const char* name, const Buffer& buffer, AccessMode mode) {
    run(stream, name, buffer.use(), buffer.data(), static_cast<std::size_t>(buffer.bytes()), mode);
  }
  void run(StreamId stream, const char* name, AccessMode mode) {
    run(stream, name, use, bytes.data(), bytes.size(), mode);
  }
  void order(StreamId later, StreamId earlier) {
    device.stream(later).wait(device.stream(earlier).record());
  }
  // Without the k-th wait of what follows.
  void forget(std::uint64_t k) {
    Mutator::install(device.context(), {Mutation::Kind::forget_wait, k});
  }
  Memory& memory() const { return Memory::of(device); }

  // The only race, empty where there is none.
  std::string race() const {
    CHECK(checker->race_count() <= 1);
    return checker->race_count() == 0 ? "" : checker->races()[0].to_string();
  }

  std::shared_ptr<RaceChecker> checker;
  Device device;
  std::array<std::byte, 64> bytes{};
  LastUse use;
};

using enum StreamId;

}  // namespace

TEST_CASE("F1: a reduced gradient is freed while its copy to the host still runs", "[promises]") {
  const bool repaired = GENERATE(false, true);
  Rank r;
  if (!repaired) r.forget(2);  // the gate of the freed block
  {
    const Buffer gradient = r.memory().allocate(256, reduce);
    r.run(reduce, "reduce_scatter", gradient, W);
    r.order(transfer, reduce);
    r.run(transfer, "copy_to_host", gradient, R);
  }
  const Buffer next = r.memory().allocate(256, reduce);
  r.run(reduce, "reduce_scatter", next, W);
  if (repaired) {
    CHECK(r.race().empty());
    CHECK(r.memory().pool().gates_fired() == 1);  // healed by our pool
  } else {
    CHECK_THAT(r.race(), Contains("reuse of 256 bytes") && Contains("'copy_to_host' on transfer") &&
                             Contains("make reduce wait for transfer's tick 1"));
  }
}

TEST_CASE("F2: a hook reads pinned memory before the copy into it is done", "[promises]") {
  const bool repaired = GENERATE(false, true);
  Rank r;
  r.run(transfer, "copy_to_host", W);
  if (repaired) r.device.block(r.device.stream(transfer).record());
  r.device.context().host_reads(r.bytes.data(), r.bytes.size());
  if (repaired)
    CHECK(r.race().empty());
  else
    CHECK_THAT(r.race(), Contains("the host of rank 0 may read") &&
                             Contains("block the host on transfer's tick 1"));
}

TEST_CASE("F3: a chunk's backward writes what the last chunk still accumulates", "[promises]") {
  const int wait = GENERATE(0, 1, 2);  // none, at the exit of the chunk, after the next has begun
  Rank r;
  r.run(reduce, "accumulate chunk 0", W);
  if (wait == 1) r.order(compute, reduce);
  r.run(compute, "backward chunk 1", W);
  if (wait == 2) r.order(compute, reduce);
  CHECK(r.race().empty() == (wait == 1));
  if (wait != 1) CHECK_THAT(r.race(), Contains("make compute wait for reduce's tick 1"));
}

TEST_CASE("F4: the optimizer waits for the group that was expected to come last", "[promises]") {
  const bool repaired = GENERATE(false, true);
  Rank r;
  LastUse other;
  std::array<std::byte, 64> last{};
  r.run(reduce, "reduce_scatter layers.1", other, last.data(), last.size(), W);
  Event drained = r.device.reduce().record();
  r.run(reduce, "reduce_scatter layers.0", W);  // hooks ran in another order
  if (repaired) drained = r.device.reduce().record();
  r.device.compute().wait(drained);
  r.run(compute, "norm", R);
  CHECK(r.race().empty() == repaired);
  if (!repaired) CHECK_THAT(r.race(), Contains("'reduce_scatter layers.0'"));
}

TEST_CASE("F5: a third stream has waited, the home stream of the memory has not", "[promises]") {
  const bool repaired = GENERATE(false, true);
  Rank r;
  if (!repaired) r.forget(3);  // the gate of the home stream
  {
    const Buffer stash = r.memory().allocate(256, compute);
    r.run(compute, "fill", stash, W);
    r.order(reduce, compute);
    r.run(reduce, "all_reduce", stash, W);
    r.order(replicate, reduce);  // whoever waits, it is not compute
  }
  const Buffer next = r.memory().allocate(256, compute);
  r.run(compute, "next tensor", next, W);
  CHECK(r.race().empty() == repaired);
  if (!repaired) CHECK_THAT(r.race(), Contains("make compute wait for reduce's tick 1"));
}

TEST_CASE("F6: memory of one stream is used on another that never waited", "[promises]") {
  const bool repaired = GENERATE(false, true);
  Rank r;
  r.run(compute, "earlier work", R);
  const Buffer main_grad = r.memory().allocate(256, compute);
  if (repaired) r.order(reduce, compute);
  r.run(reduce, "accumulate", main_grad, W);
  CHECK(r.race().empty() == repaired);
  if (!repaired) CHECK_THAT(r.race(), Contains("compute records after the allocation"));
}

TEST_CASE("F7: a gathered bucket is resized to zero before its readers are submitted",
          "[promises]") {
  const bool repaired = GENERATE(false, true);
  Rank r;
  const Buffer memory = r.memory().allocate(512, compute);
  Arena arena(r.device.context(), memory.data(), 512);
  const OwnerId owner = r.memory().ledger().owner("gather slots");
  const Slot slot = arena.take(0, 512, owner);
  arena.begin_use(slot, StreamId::gather);
  r.run(StreamId::gather, "all_gather", *slot.use, slot.data, 512, W);
  r.order(compute, StreamId::gather);
  if (!repaired) arena.give_back(slot);
  r.run(compute, "matmul", *slot.use, slot.data, 512, R);
  if (repaired) arena.give_back(slot);
  CHECK(r.race().empty() == repaired);
  if (!repaired) CHECK_THAT(r.race(), Contains("of 'gather slots' after they were given back"));
}

TEST_CASE("F8: one rank's thread copies for all and waits only for its own stream", "[promises]") {
  const bool repaired = GENERATE(false, true);
  const auto checker = RaceChecker::make();
  std::barrier<> hosts(2);  // of the hosts alone: it orders no stream
  const std::byte* sent = nullptr;
  const WorldOptions options{
      .executor = ExecutorKind::inlined, .threads = 1, .race_checker = checker};
  run_local(2, options, [&](World& world) {
    const Stream stream = world.device().gather();
    LastUse use;
    Buffer buffer;
    if (world.rank() == 1) {
      buffer = Memory::of(world.device()).allocate(256, compute);
      sent = buffer.data();
      const Access fill{&buffer.use(), sent, sent + 256, W};
      world.device().compute().launch({.name = "fill", .accesses = {&fill, 1}}, [](Exec&) {});
      stream.wait(world.device().compute().record());
    }
    hosts.arrive_and_wait();
    if (repaired) world.gather().submit({.kind = CollectiveKind::barrier}, "all have filled", {});
    const Access copy{&use, sent, sent + 256, R};
    if (world.rank() == 0)
      stream.launch({.name = "copy for all", .accesses = {&copy, 1}}, [](Exec&) {});
    world.gather().submit({.kind = CollectiveKind::barrier}, "all have copied", {});
    world.device().synchronize();
  });
  CHECK(checker->race_count() == (repaired ? 0 : 1));
  if (!repaired)
    CHECK_THAT(checker->races().at(0).to_string(), Contains("'copy for all' on gather (rank 0") &&
                                                       Contains("'fill' on compute (rank 1") &&
                                                       Contains("by a collective"));
}

TEST_CASE("F9: the event of completion is recorded on the wrong stream", "[promises]") {
  const StreamId recorded_on = GENERATE(reduce, replicate);
  Rank r;
  r.run(reduce, "reduce_scatter", W);
  r.order(replicate, reduce);
  r.run(replicate, "all_reduce", W);
  r.order(compute, recorded_on);
  r.run(compute, "norm", R);
  CHECK(r.race().empty() == (recorded_on == replicate));
  if (recorded_on == reduce) CHECK_THAT(r.race(), Contains("make compute wait for replicate's"));
}

TEST_CASE("F10: a blocking copy waits for the default stream, not for the producer", "[promises]") {
  const bool repaired = GENERATE(false, true);
  Rank r;
  r.run(StreamId::gather, "produce", W);
  if (repaired) r.order(compute, StreamId::gather);
  r.run(compute, "copy_to_host", R);
  r.device.block(r.device.compute().record());
  CHECK(r.race().empty() == repaired);
}

TEST_CASE("F11: a prefetch overwrites what slow compute has yet to read", "[promises]") {
  const bool repaired = GENERATE(false, true);
  Rank r;
  const Buffer memory = r.memory().allocate(512, compute);
  Arena arena(r.device.context(), memory.data(), 512);
  const OwnerId owner = r.memory().ledger().owner("gather slots");
  if (!repaired) r.forget(2);  // of taking the slot again
  for (const char* layer : {"prefetch 0", "prefetch 1"}) {
    const Slot slot = arena.take(0, 512, owner);
    arena.begin_use(slot, transfer);
    r.run(transfer, layer, *slot.use, slot.data, 512, W);
    r.order(compute, transfer);
    r.run(compute, "use", *slot.use, slot.data, 512, R);
    arena.give_back(slot);
  }
  CHECK(r.race().empty() == repaired);
  if (!repaired) CHECK_THAT(r.race(), Contains("make transfer wait for compute's tick 1"));
}

TEST_CASE("F12: storage goes back to the system while a side stream copies from it", "[promises]") {
  const bool repaired = GENERATE(false, true);
  Rank r;
  r.run(transfer, "copy_to_host", R);
  if (repaired) r.device.block(r.device.stream(transfer).record());
  r.device.context().tell({.kind = MemoryEvent::Kind::released,
                           .begin = r.bytes.data(),
                           .end = r.bytes.data() + r.bytes.size()});
  CHECK(r.race().empty() == repaired);
  if (!repaired) CHECK_THAT(r.race(), Contains("to the system while 'copy_to_host'"));
}

TEST_CASE("F13: ranks issue their collectives in different orders", "[promises]") {
  std::string message;
  try {
    run_checked(2, {.executor = testing::shuffled(5)}, [](World& world) {
      const char* names[] = {"reduce layers.0", "reduce layers.1"};
      for (const int i : {0, 1})
        world.reduce().submit({.kind = CollectiveKind::barrier}, names[(i + world.rank()) % 2], {});
      world.device().synchronize();
    });
  } catch (const CommError& error) {
    message = error.what();
  }
  CHECK_THAT(message, Contains("reduce layers.0") && Contains("reduce layers.1"));
}

TEST_CASE("F14: a race whose values happen to be right", "[promises]") {
  const bool repaired = GENERATE(false, true);
  Rank r;
  float gradient = 0, reduced = -1;
  float* const g = &gradient;
  float* const out = &reduced;
  const Access write{&r.use, g, g + 1, W}, read{&r.use, g, g + 1, R};
  r.device.compute().launch({.name = "backward", .accesses = {&write, 1}},
                            [g](Exec&) { *g = 1e-30f; });
  if (repaired) r.order(reduce, compute);
  r.device.reduce().launch({.name = "reduce_scatter", .accesses = {&read, 1}},
                           [g, out](Exec&) { *out = *g; });
  r.device.synchronize();
  CHECK(reduced == 1e-30f);  // no test of values sees it
  CHECK(r.race().empty() == repaired);
}

TEST_CASE("F15: references that are kept for safety hold memory of every layer", "[promises]") {
  const bool repaired = GENERATE(false, true);
  const auto working_set = [repaired](int layers) {  // bytes at the peak of a forward
    Rank r;
    std::vector<Buffer> kept;
    for (int layer = 0; layer < layers; ++layer) {
      Buffer gathered = r.memory().allocate(512, StreamId::gather);
      r.run(StreamId::gather, "all_gather", gathered, W);
      r.order(compute, StreamId::gather);
      r.run(compute, "matmul", gathered, R);
      if (!repaired) kept.push_back(std::move(gathered));
    }
    CHECK(r.race().empty());  // the safe direction
    return r.memory().ledger().peak_bytes();
  };
  CHECK(working_set(2) >= 512);
  CHECK(working_set(8) - working_set(2) == (repaired ? 0 : 6 * 512));
}

TEST_CASE("F15: slots give no memory to a layer more than the plan counts", "[promises]") {
  Rank r;
  const Buffer memory = r.memory().allocate(1024, compute);
  Arena arena(r.device.context(), memory.data(), 1024);
  const std::vector<Slot> kept{arena.take(0, 512, kActivations),
                               arena.take(512, 512, kActivations)};
  // A third layer's memory does not exist: the arena is as large as the plan, not as the host runs.
  CHECK(arena.best_gap(512) == -1);
  CHECK(arena.take(512, 512, kActivations).arena == nullptr);
  for (const Slot& slot : kept) arena.give_back(slot);
}
