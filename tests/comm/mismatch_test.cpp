// No way in which a rank of threads goes astray is missed, or touches memory.
#include "tests/comm/mismatch.hpp"

#include <random>

#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;

TEST_CASE("a rank that goes astray is named on every rank, before a byte moves",
          "[comm][threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 draw(seed);
  for (const ExecutorChoice& executor : testing::executors(seed))
    for (int ranks = 2; ranks <= 4; ++ranks)
      for (const mismatch::Kind& kind : mismatch::kinds()) {
        const int odd = static_cast<int>(draw() % static_cast<unsigned>(ranks));
        std::vector<mismatch::Heard> heard(static_cast<std::size_t>(ranks));
        INFO(ranks << " ranks, " << name(executor));
        // Not under the race checker: what fails gives memory back while work that no longer runs
        // is due on it.
        CHECK_THROWS(run_local(ranks, {.executor = executor}, [&](World& world) {
          auto& mine = heard[static_cast<std::size_t>(world.rank())];
          mine = mismatch::provoke(world, kind, odd);
          throw std::runtime_error(mine.message);
        }));
        for (int rank = 0; rank < ranks; ++rank)
          CHECK(mismatch::verdict(heard[static_cast<std::size_t>(rank)], kind, rank, odd) == "");
      }
}
