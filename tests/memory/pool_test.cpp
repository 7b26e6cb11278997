// The pool as an allocator: whatever the sequence, blocks do not overlap, the books agree, and the
// same sequence gives the same addresses.
#include "tessera/memory/pool.hpp"

#include <algorithm>
#include <cstring>
#include <random>

#include "runtime/memory/testing.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/memory/helpers.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using tessera::testing::ListedMemory;
using tessera::testing::touch;

namespace {

// Mostly small, some of them larger than a segment, now and then large.
std::int64_t random_bytes(std::mt19937_64& rng) {
  const int bits = static_cast<int>(rng() % 10 == 0 ? 16 + rng() % 8 : 1 + rng() % 15);
  return static_cast<std::int64_t>(rng() % (std::uint64_t{1} << bits)) + 1;
}

struct Live {
  Block* block;
  unsigned char mark;
};

// Runs a random program over `pool` and calls check() after each step.
template <class Check>
void run_random(const Device& device, Pool& pool, std::mt19937_64& rng, int steps,
                std::vector<Live>& live, const Check& check) {
  for (int i = 0; i < steps; ++i) {
    const auto stream = static_cast<StreamId>(rng() % 3);
    if (live.empty() || rng() % 5 < 3) {
      const auto bytes = random_bytes(rng);
      Block* const block = pool.allocate(bytes, stream, static_cast<OwnerId>(rng() % 2));
      REQUIRE(block->bytes >= bytes);
      live.push_back({block, static_cast<unsigned char>(rng())});
      if (device.runs_bodies())
        std::memset(block->data, live.back().mark, static_cast<std::size_t>(block->bytes));
      if (rng() % 2) touch(device, stream, block->use);
    } else {
      const std::size_t k = rng() % live.size();
      Block* const block = live[k].block;
      if (device.runs_bodies())  // nobody else wrote here
        for (const std::int64_t at : {std::int64_t{0}, block->bytes / 2, block->bytes - 1})
          REQUIRE(static_cast<unsigned char>(block->data[at]) == live[k].mark);
      if (rng() % 4 == 0) {
        device.stream(stream).wait(device.stream(block->stream).record());
        touch(device, stream, block->use);
      }
      pool.free(block);
      live[k] = live.back();
      live.pop_back();
    }
    check();
  }
}

}  // namespace

TEST_CASE("random sequences keep every invariant of the pool") {
  const auto kind = GENERATE(ExecutorKind::inlined, ExecutorKind::virtual_);
  const std::uint64_t seed = testing::fresh_seed();
  INFO("executor " << name(kind) << ", seed " << seed);
  std::mt19937_64 rng(seed);
  const Device device = Device::cpu({.executor = kind});
  Ledger ledger;
  ledger.owner("second");
  ListedMemory::Segments segments;
  Pool pool(device.context(), ledger,
            std::make_unique<ListedMemory>(
                kind == ExecutorKind::inlined ? system_memory() : counted_memory(), segments));
  std::vector<Live> live;
  run_random(device, pool, rng, 3000, live, [&] {
    REQUIRE(PoolTesting::is_valid(pool));
    std::int64_t reserved = 0, booked[2] = {};
    for (const auto& [data, bytes] : segments) reserved += bytes;
    REQUIRE(pool.reserved_bytes() == reserved);
    for (const Live& l : live) booked[l.block->owner] += l.block->bytes;
    REQUIRE(ledger.live_bytes() == booked[0] + booked[1]);
    REQUIRE(ledger.live_bytes("second") == booked[1]);
  });

  std::sort(live.begin(), live.end(),
            [](const Live& a, const Live& b) { return a.block->data < b.block->data; });
  for (std::size_t i = 0; i < live.size(); ++i) {
    const Block& b = *live[i].block;
    CHECK(reinterpret_cast<std::uintptr_t>(b.data) % kAlignmentBytes == 0);
    CHECK(b.bytes % kAlignmentBytes == 0);
    if (i > 0) CHECK(live[i - 1].block->data + live[i - 1].block->bytes <= b.data);
    CHECK(std::any_of(segments.begin(), segments.end(), [&](const auto& s) {
      return s.first <= b.data && b.data + b.bytes <= s.first + s.second;
    }));
  }
  for (const Live& l : live) pool.free(l.block);
  CHECK(ledger.live_bytes() == 0);
  CHECK(PoolTesting::is_valid(pool));
  CHECK(pool.release_cached() > 0);
  CHECK(pool.reserved_bytes() == 0);
  CHECK(segments.empty());
}

TEST_CASE("the same sequence gives the same addresses relative to the segments, on any executor",
          "[threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  using Address = std::pair<std::size_t, std::ptrdiff_t>;  // segment in order of taking, offset
  const auto addresses = [&](const ExecutorChoice& executor) {
    std::mt19937_64 rng(seed);
    const Device device = Device::cpu({.executor = executor});
    Ledger ledger;
    ledger.owner("second");
    ListedMemory::Segments segments;
    Pool pool(device.context(), ledger, std::make_unique<ListedMemory>(counted_memory(), segments));
    std::vector<Live> live;
    std::vector<Address> out;
    // Marks are written by the host above only where memory is real; here it is counted.
    for (int i = 0; i < 1500; ++i) {
      const auto stream = static_cast<StreamId>(rng() % 3);
      if (live.empty() || rng() % 5 < 3) {
        Block* const block = pool.allocate(random_bytes(rng), stream, 0);
        live.push_back({block, 0});
        for (std::size_t s = 0; s < segments.size(); ++s)
          if (const auto offset = block->data - segments[s].first;
              offset >= 0 && offset < segments[s].second)
            out.emplace_back(s, offset);
        touch(device, stream, block->use);
      } else {
        const std::size_t k = rng() % live.size();
        touch(device, stream, live[k].block->use);
        pool.free(live[k].block);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(k));
      }
    }
    for (const Live& l : live) pool.free(l.block);
    return out;
  };
  const std::vector<Address> expected = addresses(ExecutorKind::inlined);
  CHECK(expected.size() > 500);
  CHECK(addresses(ExecutorKind::threaded) == expected);
  CHECK(addresses(testing::shuffled(0)) == expected);
  CHECK(addresses(ExecutorKind::virtual_) == expected);
}

TEST_CASE("a freed block is the next one handed out for its size, and neighbours merge") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Ledger ledger;
  Pool pool(device.context(), ledger, system_memory());
  Block* a = pool.allocate(1000, StreamId::compute, 0);
  Block* b = pool.allocate(1000, StreamId::compute, 0);
  Block* c = pool.allocate(1000, StreamId::compute, 0);
  CHECK(a->bytes == 1024);
  CHECK(b->data == a->data + 1024);
  std::byte* const start = a->data;
  pool.free(b);
  b = pool.allocate(1024, StreamId::compute, 0);
  CHECK(b->data == start + 1024);
  pool.free(a);
  pool.free(c);  // merges with the rest of the segment
  pool.free(b);  // ... and with both sides
  a = pool.allocate(kSegmentBytes, StreamId::compute, 0);
  CHECK(a->data == start);
  CHECK(pool.segments_taken() == 1);
  pool.free(a);
}

TEST_CASE("a large block takes the first room beside its owner's, an activation any") {
  const Device device = Device::cpu({.executor = ExecutorKind::virtual_});
  Ledger ledger;
  const OwnerId mine = ledger.owner("mine"), other = ledger.owner("other");
  Pool pool(device.context(), ledger, counted_memory());
  constexpr std::int64_t kPart = 2 * kSegmentBytes;
  static_assert(kPart >= kLargeBytes);
  const auto allocate = [&](std::int64_t parts, OwnerId owner) {
    return pool.allocate(parts * kPart, StreamId::compute, owner);
  };
  //  a: other │ b: 3 │ c: other │ d: 2 │ e: mine │ f: 3 │ g: activation
  Block *const a = allocate(1, other), *const b = allocate(3, other), *const c = allocate(1, other),
               *const d = allocate(2, other), *const e = allocate(1, mine),
               *const f = allocate(3, other), *const g = allocate(1, kActivations);
  std::byte *const at_b = b->data, *const at_e = e->data, *const at_f = f->data;
  for (Block* const block : {f, b, d})
    pool.free(block);  // room is looked for in the order of addresses
  Block* const activation = allocate(1, kActivations);
  CHECK(activation->data == at_b);
  pool.free(activation);
  Block* const before = allocate(1, mine);
  CHECK(before->data == at_e - kPart);  // at the end of where d was
  Block* const too_large = allocate(3, mine);
  CHECK(too_large->data == at_f);  // beside e as well
  Block* const elsewhere = allocate(2, mine);
  CHECK(elsewhere->data == at_b);  // nothing fits beside a block of mine
  Block* const next = allocate(1, mine);
  CHECK(next->data == at_b + 2 * kPart);
  CHECK(PoolTesting::is_valid(pool));

  // A small block that stays is no wall.
  Block* const small = pool.allocate(256, StreamId::compute, other);
  CHECK((small->data < a->data || small->data >= g->data + g->bytes));
  const std::int64_t reserved = pool.reserved_bytes();
  pool.free(g);
  Block* const longer = allocate(2, other);
  CHECK(pool.reserved_bytes() == reserved + kPart);
  for (Block* const block : {a, c, e, before, too_large, elsewhere, next, small, longer})
    pool.free(block);
  CHECK(PoolTesting::is_valid(pool));
}

TEST_CASE("a steady step takes no segment and fires no gate") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  const Device device = Device::cpu({.executor = ExecutorKind::virtual_});
  Ledger ledger;
  Pool pool(device.context(), ledger, counted_memory());
  const auto step = [&] {  // forward keeps one buffer a layer, backward frees them from the end
    std::mt19937_64 rng(seed);
    std::vector<Block*> kept;
    for (int layer = 0; layer < 24; ++layer) {
      Block* const wide = pool.allocate(random_bytes(rng) * 8, StreamId::compute, 0);
      kept.push_back(pool.allocate(random_bytes(rng) * 8, StreamId::compute, 0));
      touch(device, StreamId::compute, wide->use);
      touch(device, StreamId::compute, kept.back()->use);
      pool.free(wide);
    }
    while (!kept.empty()) {
      Block* const gradient = pool.allocate(kept.back()->bytes, StreamId::compute, 0);
      touch(device, StreamId::compute, gradient->use);
      pool.free(kept.back());
      pool.free(gradient);
      kept.pop_back();
    }
  };
  // The first step grows the pool on demand; the second starts from merged segments, so its layout
  // may differ and grow it once more. From then on every step starts as the one before it did.
  step();
  step();
  step();
  const std::uint64_t segments = pool.segments_taken();
  for (int i = 0; i < 5; ++i) step();
  CHECK(pool.segments_taken() == segments);
  CHECK(pool.gates_fired() == 0);
}

TEST_CASE("sizes that cannot be are refused by name") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Ledger ledger;
  Pool pool(device.context(), ledger, system_memory());
  CHECK_THROWS_AS(pool.allocate(0, StreamId::compute, 0), ContractError);
  CHECK_THROWS_WITH(pool.allocate(-5, StreamId::compute, 0), Catch::Contains("-5 bytes"));
  CHECK_THROWS_AS(pool.allocate(INT64_MAX, StreamId::compute, 0), OutOfMemory);
  CHECK(pool.segments_taken() == 0);
}

TEST_CASE("beyond its limit the pool releases what it caches, then throws with the ledger") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Ledger ledger;
  const OwnerId weights = ledger.owner("weights");
  Pool pool(device.context(), ledger, system_memory());
  pool.set_limit_bytes(2 * kSegmentBytes);
  Block* const a = pool.allocate(kSegmentBytes, StreamId::compute, weights);
  Block* b = pool.allocate(kSegmentBytes, StreamId::compute, 0);

  try {
    pool.allocate(1000, StreamId::gather, weights);
    FAIL("there is no memory left");
  } catch (const OutOfMemory& error) {
    CHECK_THAT(error.what(), Catch::Contains("no 1024 bytes for 'weights' on stream gather"));
    CHECK_THAT(error.what(), Catch::Contains("the limit is 4194304"));
    CHECK_THAT(error.what(), Catch::Contains(ledger.table()));
  }
  CHECK(ledger.live_bytes() == 2 * kSegmentBytes);  // a failed request leaves no trace

  pool.free(b);  // cached on compute, so of no use to gather until it is released
  b = pool.allocate(1000, StreamId::gather, 0);
  CHECK(b->stream == StreamId::gather);
  CHECK(pool.reserved_bytes() == 2 * kSegmentBytes);
  CHECK(PoolTesting::is_valid(pool));
  pool.free(a);
  pool.free(b);
}

TEST_CASE("only segments without a live block are released") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Ledger ledger;
  Pool pool(device.context(), ledger, system_memory());
  Block* const kept = pool.allocate(1000, StreamId::compute, 0);
  Block* const whole = pool.allocate(kSegmentBytes, StreamId::compute, 0);
  kept->data[999] = std::byte{7};
  CHECK(pool.release_cached() == 0);
  pool.free(whole);
  CHECK(pool.release_cached() == kSegmentBytes);
  CHECK(pool.reserved_bytes() == kSegmentBytes);
  CHECK(kept->data[999] == std::byte{7});
  pool.free(kept);
  CHECK(pool.release_cached() == kSegmentBytes);
}

TEST_CASE("a system without memory is out of memory too") {
  struct Empty final : Upstream {
    std::byte* allocate(std::int64_t) noexcept override { return nullptr; }
    void release(std::byte*, std::int64_t) noexcept override {}
    bool resize(std::byte*, std::int64_t, std::int64_t) noexcept override { return false; }
  };
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Ledger ledger;
  Pool pool(device.context(), ledger, std::make_unique<Empty>());
  CHECK_THROWS_AS(pool.allocate(1, StreamId::compute, 0), OutOfMemory);
  CHECK(pool.reserved_bytes() == 0);
  CHECK(ledger.live_bytes() == 0);
}
