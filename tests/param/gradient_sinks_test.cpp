// Where gradients are written: what has arrived, and what a second contribution adds to.
#include "runtime/param/gradient_sinks.hpp"

#include <random>

#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;

TEST_CASE("an arrival mask holds what was added, in words of 64 entries") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 engine(seed);
  for (const std::size_t entries : {1, 63, 64, 65, 200}) {
    ArrivalMask mask(entries);
    REQUIRE(mask.words() == (entries + 63) / 64);
    CHECK(mask.empty());
    std::vector<bool> expected(entries);
    for (std::size_t i = 0; i < entries; ++i) {
      const std::size_t entry = engine() % entries;
      CHECK(mask.add(entry) == expected[entry]);
      expected[entry] = true;
    }
    for (std::size_t entry = 0; entry < entries; ++entry) {
      CHECK(mask.has(entry) == expected[entry]);
      CHECK((mask.word(entry / 64) >> (entry % 64) & 1) == (expected[entry] ? 1 : 0));
    }
    const std::uint64_t first = mask.word(0);
    CHECK(mask.take_word(0) == first);
    CHECK(mask.word(0) == 0);
    CHECK(!mask.has(0));
    mask.fill();
    for (std::size_t entry = 0; entry < entries; ++entry) CHECK(mask.add(entry));
    mask.clear();
    CHECK(mask.empty());
  }
}
