#include "tessera/memory/offset_plan.hpp"

#include <random>

#include "tessera/memory/memory.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;

namespace {

// Whether no two buffers overlap in time and in address.
bool are_apart(const std::vector<Interval>& all, const PlacedIntervals& at) {
  for (std::size_t a = 0; a < all.size(); ++a)
    for (std::size_t b = 0; b < a; ++b) {
      const bool in_time = all[a].begin < all[b].end && all[b].begin < all[a].end;
      const bool in_address = at.offsets[a] < at.offsets[b] + all[b].bytes &&
                              at.offsets[b] < at.offsets[a] + all[a].bytes;
      if (in_time && in_address) return false;
    }
  return true;
}

}  // namespace

TEST_CASE("buffers that live at one time lie apart, wherever they are placed") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<Interval> all(random() % 40);
    for (Interval& one : all) {
      one.bytes = 1 + static_cast<std::int64_t>(random() % 5000);
      one.begin = static_cast<std::int64_t>(random() % 50);
      one.end = one.begin + 1 + static_cast<std::int64_t>(random() % 20);
    }
    const PlacedIntervals at = place(all);
    CHECK(are_apart(all, at));
    CHECK(at.bytes >= most_alive(all));
    for (const std::int64_t offset : at.offsets) CHECK(offset % kAlignmentBytes == 0);
    CHECK(place(all).offsets == at.offsets);
  }
  CHECK(place({}).bytes == 0);
}

TEST_CASE("a step of blocks and a head needs what is alive, where equal slots need more") {
  // Gathers that begin one call ahead: ten blocks and a head five times as large, in forward and
  // back, and a piece for each gradient, alive for two calls.
  constexpr std::int64_t kBlock = 1 << 20;
  std::vector<Interval> all;
  const auto bytes = [](std::int64_t call) { return call == 10 ? 5 * kBlock : kBlock; };
  for (std::int64_t call = 0; call <= 10; ++call) all.push_back({bytes(call), call - 1, call + 1});
  for (std::int64_t call = 10; call >= 0; --call) {
    all.push_back({bytes(call), 20 - call, 22 - call});
    all.push_back({2 * bytes(call), 21 - call, 23 - call});
  }
  const PlacedIntervals at = place(all);
  CHECK(are_apart(all, at));
  CHECK(at.bytes == most_alive(all));
  CHECK(at.bytes < 2 * 5 * kBlock + 2 * 10 * kBlock);  // two slots of the largest for each kind
}

TEST_CASE("what lies somewhere already stays there, and others lie around it") {
  const std::vector<Interval> all{{.bytes = 512, .begin = 0, .end = 9, .offset = 1024},
                                  {.bytes = 1024, .begin = 0, .end = 5},
                                  {.bytes = 1024, .begin = 5, .end = 9},
                                  {.bytes = 256, .begin = 2, .end = 7}};
  const PlacedIntervals at = place(all);
  CHECK(are_apart(all, at));
  CHECK(at.offsets[0] == 1024);
  CHECK(at.bytes == 1024 + 512 + 256);
}
