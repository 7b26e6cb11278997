#include "tessera/memory/ledger.hpp"

#include <algorithm>
#include <random>

#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;

TEST_CASE("a ledger has one owner from the start, and names keep their ids") {
  Ledger ledger;
  CHECK(ledger.owner("activations") == 0);
  const OwnerId weights = ledger.owner("weights");
  CHECK(weights == 1);
  CHECK(ledger.owner("moments") == 2);
  CHECK(ledger.owner("weights") == weights);
  CHECK(ledger.live_bytes("nobody") == 0);
}

TEST_CASE("what is outside of a ledger is in its table and in no sum") {
  Ledger ledger;
  CHECK(ledger.outside_bytes("a library") == 0);
  ledger.add_outside("a library", 5);
  ledger.add_outside("a library", 7);
  CHECK(ledger.outside_bytes("a library") == 12);
  CHECK(ledger.live_bytes() == 0);
  CHECK(ledger.peak_bytes() == 0);
  CHECK(ledger.lines().size() == 1);
  CHECK(ledger.table().ends_with("\noutside: a library, 12 bytes"));
  ledger.add_outside("a library", -12);
  CHECK(ledger.table().find("library") == std::string::npos);
}

TEST_CASE("live bytes are sums over owners and the peak is their largest sum") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 rng(seed);
  Ledger ledger;
  const char* const names[] = {"activations", "weights", "slots"};
  std::int64_t live[3] = {}, at_peak[3] = {}, peak = 0;
  for (int i = 0; i < 2000; ++i) {
    const std::size_t o = rng() % 3;
    const OwnerId id = ledger.owner(names[o]);
    if (rng() % 2) {
      const auto bytes = static_cast<std::int64_t>(rng() % 1000) + 1;
      ledger.add(id, bytes);
      live[o] += bytes;
    } else if (live[o] > 0) {
      const auto bytes = static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(live[o])) + 1;
      ledger.remove(id, bytes);
      live[o] -= bytes;
    }
    if (const std::int64_t all = live[0] + live[1] + live[2]; all > peak) {
      peak = all;
      std::copy(live, live + 3, at_peak);
    }
    if (i == 1000) {
      ledger.reset_peak();
      peak = live[0] + live[1] + live[2];
      std::copy(live, live + 3, at_peak);
    }
    REQUIRE(ledger.live_bytes() == live[0] + live[1] + live[2]);
    REQUIRE(ledger.peak_bytes() == peak);
    for (std::size_t k = 0; k < 3; ++k) REQUIRE(ledger.live_bytes(names[k]) == live[k]);
    if (i % 7 != 0) continue;  // reading the lines must not disturb what comes after
    for (const Ledger::Line& line : ledger.lines()) {
      const auto k = static_cast<std::size_t>(std::find(names, names + 3, line.owner) - names);
      REQUIRE(line.live_bytes == live[k]);
      REQUIRE(line.at_peak_bytes == at_peak[k]);
    }
  }
}

TEST_CASE("the table names every owner that holds or held something, and the sum") {
  Ledger ledger;
  ledger.add(ledger.owner("weights"), 1024);
  ledger.owner("never used");
  ledger.add(0, 512);
  ledger.remove(0, 512);
  CHECK(ledger.table() ==
        "owner               live bytes         at peak\n"
        "activations                  0             512\n"
        "weights                   1024            1024\n"
        "all                       1024            1536");
}
