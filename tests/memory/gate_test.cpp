// Gates: what the next user of a freed block waits for, and that nothing else is waited for.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "tessera/device/device_context.hpp"
#include "tests/memory/helpers.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr std::int64_t kHuge =
    kSegmentBytes;  // a block that fills a segment, so it has no neighbours

struct World {
  Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Ledger ledger;
  Pool pool{device.context(), ledger, system_memory()};

  // A block of compute that `other` has touched last, freed.
  std::byte* used_elsewhere(StreamId other, std::int64_t bytes = kHuge) {
    Block* const block = pool.allocate(bytes, kCompute, 0);
    std::byte* const data = block->data;
    touch(device, kCompute, block->use);
    device.stream(other).wait(device.compute().record());
    touch(device, other, block->use);
    pool.free(block);
    return data;
  }
};

}  // namespace

TEST_CASE("reuse by the stream that used a block costs nothing") {
  World w;
  Block* block = w.pool.allocate(kHuge, kCompute, 0);
  touch(w.device, kCompute, block->use);
  std::byte* const data = block->data;
  w.pool.free(block);
  block = w.pool.allocate(kHuge, kCompute, 0);
  CHECK(block->data == data);
  CHECK(w.pool.gates_fired() == 0);
  w.pool.free(block);
}

TEST_CASE("a block that another stream touched is handed out behind a wait for it") {
  World w;
  std::byte* const data = w.used_elsewhere(kGather);
  CHECK(w.device.compute().clock()[kGather] == 0);
  Block* const block = w.pool.allocate(kHuge, kCompute, 0);
  CHECK(block->data == data);
  CHECK(w.pool.gates_fired() == 1);
  CHECK(w.device.compute().clock()[kGather] == 1);    // ordered after the touch
  CHECK(w.device.context().host_clock() == Clock{});  // and the host did not block for it
  w.pool.free(block);
  w.pool.free(w.pool.allocate(kHuge, kCompute, 0));
  CHECK(w.pool.gates_fired() == 1);  // once waited for, it is past
}

TEST_CASE("no gate fires where home stream or host knows already that the other stream is done") {
  World w;
  SECTION("the home stream waited before the free") {
    Block* const block = w.pool.allocate(kHuge, kCompute, 0);
    touch(w.device, kGather, block->use);
    w.device.compute().wait(w.device.gather().record());
    w.pool.free(block);
  }
  SECTION("the home stream waited after the free") {
    w.used_elsewhere(kGather);
    w.device.compute().wait(w.device.gather().record());
  }
  SECTION("the host blocked before the free") {
    Block* const block = w.pool.allocate(kHuge, kCompute, 0);
    touch(w.device, kGather, block->use);
    w.device.block(w.device.gather().record());
    w.pool.free(block);
  }
  SECTION("the host blocked after the free") {
    w.used_elsewhere(kGather);
    w.device.synchronize();
  }
  w.pool.free(w.pool.allocate(kHuge, kCompute, 0));
  CHECK(w.pool.gates_fired() == 0);
}

TEST_CASE("a gate waits for the touch and for nothing submitted later") {
  World w;
  Block* const block = w.pool.allocate(kHuge, kCompute, 0);
  touch(w.device, kGather, block->use);  // gather's tick 1
  w.pool.free(block);
  LastUse other;
  touch(w.device, kGather, other);  // tick 2 has nothing to do with the block
  w.pool.free(w.pool.allocate(kHuge, kCompute, 0));
  CHECK(w.device.compute().clock()[kGather] == 1);
}

TEST_CASE("a gate that is passed is passed for all parts of the block, and merging joins gates") {
  World w;
  SECTION("either half waits") {
    w.used_elsewhere(kGather, 2048);
    Block* const first = w.pool.allocate(1024, kCompute, 0);
    CHECK(w.pool.gates_fired() == 1);
    Block* const second = w.pool.allocate(1024, kCompute, 0);
    CHECK(w.device.compute().clock()[kGather] == 1);
    CHECK(w.pool.gates_fired() == 1);  // the first half's wait covers the second
    w.pool.free(first);
    w.pool.free(second);
  }
  SECTION("the whole waits for the users of both halves") {
    Block* const first = w.pool.allocate(1024, kCompute, 0);
    Block* const second = w.pool.allocate(kHuge - 1024, kCompute, 0);
    touch(w.device, kGather, first->use);
    touch(w.device, kReduce, second->use);
    const bool front_first = GENERATE(true, false);
    w.pool.free(front_first ? first : second);
    w.pool.free(front_first ? second : first);
    w.pool.free(w.pool.allocate(kHuge, kCompute, 0));
    CHECK(w.pool.gates_fired() == 2);
    CHECK(w.device.compute().clock()[kGather] == 1);
    CHECK(w.device.compute().clock()[kReduce] == 1);
  }
}

TEST_CASE("memory goes back to the system only after the host has blocked on its gate",
          "[threads]") {
  const Device device = Device::cpu();
  Ledger ledger;
  Pool pool(device.context(), ledger, system_memory());
  std::atomic<int> done{0};
  std::atomic<int>* const p = &done;
  Block* block = pool.allocate(kHuge, kCompute, 0);
  const Access accesses[] = {{&block->use, nullptr, nullptr, AccessMode::write}};
  const auto nap = [p](Exec&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ++*p;
  };
  device.compute().launch({.name = "nap", .accesses = accesses}, nap);
  device.gather().launch({.name = "nap", .accesses = accesses}, nap);
  pool.free(block);
  block = pool.allocate(kHuge, kCompute, 0);
  pool.free(block);  // untouched this time: it still carries the gate of its first life
  CHECK(pool.release_cached() == kHuge);
  CHECK(done == 2);
}

// Each round writes a fresh block on one stream and reads it on two others, which keep what they
// saw. The block is freed as soon as the reads are submitted and is reused at once, so only gates
// keep the readers from seeing a later round's numbers.
TEST_CASE("freed blocks are reused safely under any schedule", "[threads]") {
  const bool is_shuffled = GENERATE(false, true);
  const std::uint64_t seed = fresh_seed();
  constexpr int kRounds = 60, kWords = 512;
  std::uint64_t fired = 0;
  for (std::uint64_t schedule = 0; schedule < (is_shuffled ? 40 : 10); ++schedule) {
    const ExecutorChoice executor =
        is_shuffled ? testing::shuffled(seed + schedule) : ExecutorKind::threaded;
    INFO("executor " << name(executor) << ", seed " << seed << " + " << schedule);
    std::mt19937_64 rng(seed + schedule);
    std::vector<std::uint64_t> seen(2 * kRounds);
    const Device device = Device::cpu({.executor = executor});
    Memory& memory = Memory::of(device);
    for (int round = 0; round < kRounds; ++round) {
      const auto writer = static_cast<StreamId>(rng() % 3);
      const Buffer buffer = memory.allocate(kWords * 8, writer);
      auto* const words = reinterpret_cast<std::uint64_t*>(buffer.data());
      const Access write[] = {{&buffer.use(), words, words + kWords, AccessMode::write}};
      const Access read[] = {{&buffer.use(), words, words + kWords, AccessMode::read}};
      device.stream(writer).launch({.name = "write", .accesses = write}, [words, round](Exec&) {
        const auto first = static_cast<std::uint64_t>(round) * kWords;
        for (std::uint64_t i = 0; i < kWords; ++i) words[i] = first + i;
      });
      const Event written = device.stream(writer).record();
      for (std::size_t k = 0; k < 2; ++k) {
        const auto reader = static_cast<StreamId>(rng() % 4);
        device.stream(reader).wait(written);
        std::uint64_t* const out = &seen[2 * static_cast<std::size_t>(round) + k];
        device.stream(reader).launch({.name = "read", .accesses = read}, [words, out](Exec&) {
          for (int i = 0; i < kWords; ++i) *out += words[i];
        });
      }
    }
    device.synchronize();
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const std::uint64_t sum = round * kWords * kWords + kWords * (kWords - 1) / 2;
      REQUIRE(seen[2 * round] == sum);
      REQUIRE(seen[2 * round + 1] == sum);
    }
    fired += memory.pool().gates_fired();
  }
  CHECK(fired > 0);  // otherwise nothing was tried
}
