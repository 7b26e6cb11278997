#include "tessera/memory/arena.hpp"

#include <cstring>
#include <deque>
#include <random>

#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/memory/helpers.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Small {
  Device device = Device::cpu({.executor = ExecutorKind::inlined});
  alignas(256) std::byte memory[4 * 1024];
  Arena arena{device.context(), memory, 4 * 1024};
  OwnerId owner = Memory::of(device).ledger().owner("arena");

  Slot take(std::int64_t offset, std::int64_t bytes, StreamId stream) {
    const Slot slot = arena.take(offset, bytes, owner);
    arena.begin_use(slot, stream);
    return slot;
  }
};

}  // namespace

TEST_CASE("using a slot waits for the holders that it overlaps and for no others") {
  Small s;
  const Slot low = s.take(0, 1024, kGather), high = s.take(1024, 1024, kGather),
             far = s.take(2048, 1024, kGather);
  touch(s.device, kCompute, *low.use);
  s.arena.give_back(low);
  touch(s.device, kCompute, *high.use);
  s.arena.give_back(high);
  touch(s.device, kCompute, *far.use);
  s.arena.give_back(far);
  CHECK(s.device.gather().clock()[kCompute] == 0);
  const Slot middle = s.take(512, 1024, kGather);   // half of either
  CHECK(s.device.gather().clock()[kCompute] == 2);  // not 3
  s.arena.give_back(middle);
  CHECK(s.device.reduce().clock()[kCompute] == 0);
  s.take(0, 256, kReduce);  // what is left of the first
  CHECK(s.device.reduce().clock()[kCompute] == 1);
}

TEST_CASE("a slot given back untouched still makes its next taker wait for the uses before") {
  Small s;
  const Slot used = s.take(0, 1024, kGather);
  touch(s.device, kCompute, *used.use);
  s.arena.give_back(used);
  s.arena.give_back(s.take(0, 2048, kGather));
  s.take(1024, 256, kReduce);  // of which nobody has used a byte: the wider holder's word
  CHECK(s.device.reduce().clock()[kCompute] == 1);
}

TEST_CASE("uses that are noted are all that the next taker waits for, where no others follow") {
  Small s;
  LastUse other;
  for (const bool noted : {false, true}) {
    const Slot range = s.take(0, 1024, kGather);
    touch(s.device, kCompute, *range.use);
    const Tick used = s.device.compute().clock()[kCompute];
    if (noted) s.arena.note_uses(range);
    touch(s.device, kCompute, other);
    s.arena.give_back(range);
    s.arena.give_back(s.take(0, 1024, kGather));
    CHECK(s.device.gather().clock()[kCompute] == used + (noted ? 0 : 1));
  }
}

TEST_CASE("the best gap is the smallest that holds the bytes, the first of equals") {
  Small s;
  CHECK(s.arena.best_gap(4096) == 0);
  CHECK(s.arena.best_gap(4097) == -1);
  const Slot a = s.take(512, 256, kGather), b = s.take(1024, 512, kGather),
             c = s.take(3840, 1, kGather);  // free: 512, 256, 2304 bytes
  CHECK(s.arena.best_gap(200) == 768);
  CHECK(s.arena.best_gap(257) == 0);
  CHECK(s.arena.best_gap(600) == 1536);
  CHECK(s.arena.best_gap(2305) == -1);
  CHECK_FALSE(s.arena.is_free(3584, 300));
  CHECK(s.arena.is_free(3584, 256));
  for (const Slot& range : {a, b, c}) s.arena.give_back(range);
  CHECK(s.arena.is_free(0, 4096));
}

TEST_CASE("the ledger books taken slots, what is in use is not given, and misuse is refused") {
  Small s;
  const Slot a = s.take(0, 1000, kGather);
  CHECK(Memory::of(s.device).ledger().live_bytes("arena") == 1024);
  CHECK(s.arena.take(512, 10, s.owner).arena == nullptr);
  CHECK(s.arena.take(3840, 257, s.owner).arena == nullptr);
  CHECK_THROWS_WITH(s.arena.take(100, 1, s.owner), Catch::Contains("multiples of 256"));
  CHECK_THROWS_WITH(s.arena.restart(), Catch::Contains("1 slots are taken"));
  s.arena.give_back(a);
  CHECK_THROWS_WITH(s.arena.give_back(a), Catch::Contains("is not taken"));
  CHECK(Memory::of(s.device).ledger().live_bytes("arena") == 0);
  s.arena.restart();
}

TEST_CASE("what the host has blocked on needs no wait") {
  Small s;
  const Slot used = s.take(0, 1024, kGather);
  touch(s.device, kCompute, *used.use);
  s.device.block(s.device.compute().record());
  s.arena.give_back(used);
  const Clock before = s.device.gather().clock();
  s.take(0, 1024, kGather);
  CHECK(s.device.gather().clock()[kCompute] == before[kCompute]);
}

TEST_CASE("a slot that is taken early waits for earlier holders at its first use") {
  Small s;
  const Slot used = s.take(0, 1024, kGather);
  touch(s.device, kCompute, *used.use);
  s.arena.give_back(used);
  const Slot early = s.arena.take(512, 1024, s.owner);
  CHECK(s.device.reduce().clock()[kCompute] == 0);
  s.arena.begin_use(early, kReduce);
  CHECK(s.device.reduce().clock()[kCompute] == 1);
  // Given back unused, it leaves the holder before it to the next.
  s.arena.give_back(early);
  s.arena.give_back(s.arena.take(0, 2048, s.owner));
  CHECK(s.device.gather().clock()[kCompute] == 0);
  s.take(0, 256, kGather);
  CHECK(s.device.gather().clock()[kCompute] == 1);
}

// --- any order ---

namespace {

// Random slots on random streams, in a schedule of `seed`: each is filled by its taker and read
// later by another stream, and given back at once. Returns how many bytes were not those of their
// holder. `remembers`: with one arena; else each range comes from an arena that knows no earlier
// holder, and nothing waits.
int torn_bytes(std::uint64_t seed, bool remembers) {
  constexpr int kRanges = 60;
  constexpr std::int64_t kBytes = 16 * 256;
  std::mt19937_64 random(seed);
  const Device device = Device::cpu({.executor = testing::shuffled(seed)});
  std::vector<std::byte> memory(kBytes);
  std::deque<Arena> arenas;
  std::vector<int> torn(kRanges);
  std::vector<Slot> ranges;
  std::vector<Arena*> owners;
  constexpr StreamId kStreams[] = {kCompute, kGather, kReduce};
  arenas.emplace_back(device.context(), memory.data(), kBytes);
  for (int i = 0; i < kRanges; ++i) {
    if (!remembers) arenas.emplace_back(device.context(), memory.data(), kBytes);
    Arena& arena = arenas.back();
    const auto bytes = static_cast<std::int64_t>(256 * (1 + random() % 6));
    std::int64_t offset = arena.best_gap(bytes);
    if (const auto other = static_cast<std::int64_t>(256 * (random() % 16));
        other + bytes <= kBytes && arena.is_free(other, bytes))
      offset = other;
    const StreamId taker = kStreams[random() % 3], user = kStreams[random() % 3];
    const Slot range = arena.take(offset, bytes, kActivations);
    arena.begin_use(range, taker);
    const Access writes[] = {{range.use, range.data, range.data + bytes, AccessMode::write}};
    const Access reads[] = {{range.use, range.data, range.data + bytes, AccessMode::read}};
    device.stream(taker).launch({.name = "fill", .accesses = writes}, [range, i](Exec&) {
      std::memset(range.data, i + 1, static_cast<std::size_t>(range.bytes));
    });
    device.stream(user).wait(device.stream(taker).record());
    device.stream(user).launch({.name = "look", .accesses = reads}, [range, i, &torn](Exec&) {
      for (std::int64_t b = 0; b < range.bytes; ++b)
        torn[static_cast<std::size_t>(i)] += range.data[b] != std::byte(i + 1);
    });
    arena.give_back(range);
  }
  device.synchronize();
  int sum = 0;
  for (const int n : torn) sum += n;
  return sum;
}

}  // namespace

TEST_CASE("no holder sees another's bytes, in any order of ranges and streams") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  int without_memory = 0;
  for (std::uint64_t k = 0; k < 200; ++k) {
    INFO("schedule " << k);
    CHECK(torn_bytes(seed + k, true) == 0);
    without_memory += torn_bytes(seed + k, false) > 0;
  }
  CHECK(without_memory > 100);  // so that a wait too few would show
}
