// A world after a failure: the ranks meet again, and exchange as if nothing had been. Training
// after one is the matter of tests/promises/.
#include <atomic>
#include <stdexcept>

#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/race_check.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::executors;
using tessera::testing::RaceCheck;
using tessera::testing::run_checked;

namespace {

// Assertions belong outside of rank threads.
void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

}  // namespace

TEST_CASE("a world that has failed sums again after recover, as often as it fails",
          "[comm][threads]") {
  for (const ExecutorChoice& executor : executors())
    for (int ranks = 1; ranks <= 4; ++ranks) {
      std::vector<std::string> causes(static_cast<std::size_t>(ranks));
      std::atomic<int> caught{0};
      run_checked(ranks, {.executor = executor, .threads = 1}, [&](World& world) {
        for (int round = 0; round < 3 * ranks; ++round) {
          const int thrower = round % ranks;
          try {
            world.sum(1);
            if (world.rank() == thrower) throw std::runtime_error("no luck");
            if (ranks > 1) world.sum(2);  // calls that the thrower never makes
          } catch (const std::exception&) {
            ++caught;
            causes[static_cast<std::size_t>(world.rank())] = world.recover();
          }
          expect(world.control().submitted() == 0, "calls count from the beginning");
          expect(world.sum(world.rank()) == ranks * (ranks - 1) / 2.0, "the sum is right");
          expect(world.max(world.rank()) == ranks - 1, "so is the largest");
        }
      });
      CHECK(caught == 3 * ranks * ranks);
      for (const std::string& cause : causes)
        CHECK(cause == concat("rank ", ranks - 1, " failed: no luck"));
    }
}

TEST_CASE("what a body throws is forgotten by recover, and what it kept from running is known",
          "[comm][threads]") {
  for (const ExecutorChoice& executor : executors()) {
    const RaceCheck check;
    World world = World::single(check({.executor = executor, .threads = 1}));
    const Stream compute = world.device().compute();
    int runs = 0;
    const auto count = [at = &runs](Exec&) { ++*at; };
    compute.launch({.name = "first"}, count);
    compute.launch({.name = "unlucky"}, [](Exec&) { throw std::runtime_error("no luck"); });
    compute.launch({.name = "skipped"}, count);
    CHECK_THROWS_WITH(world.device().synchronize(), Contains("no luck"));
    world.recover();
    const Lost& lost = world.device().context().lost();
    CHECK(lost.first[StreamId::compute] == 2);
    CHECK(lost.failed[StreamId::compute] == 2);
    CHECK(lost.first[StreamId::gather] == 0);
    CHECK(world.device().recoveries() == 1);
    compute.launch({.name = "last"}, count);
    world.device().synchronize();
    CHECK(runs == 2);
  }
}

TEST_CASE("a disagreement between ranks is recovered from", "[comm][threads]") {
  for (const ExecutorChoice& executor : executors()) {
    std::vector<std::string> heard(2);
    run_checked(2, {.executor = executor, .threads = 1}, [&](World& world) {
      try {
        world.control().submit({.kind = CollectiveKind::barrier}, world.rank() ? "odd" : "even",
                               {});
        world.device().synchronize();
      } catch (const CommError& error) {
        heard[static_cast<std::size_t>(world.rank())] = error.what();
        world.recover();
      }
      expect(world.sum(1) == 2, "the ranks agree again");
    });
    for (const std::string& text : heard) CHECK_THAT(text, Contains("odd") && Contains("even"));
  }
}

TEST_CASE("a rank that has ended comes to no recovery, and the others hear it", "[comm][threads]") {
  for (const ExecutorChoice& executor : executors())
    for (const bool by_exception : {false, true}) {
      std::vector<std::string> heard(3);
      const auto run = [&] {
        run_checked(3, {.executor = executor, .threads = 1}, [&](World& world) {
          if (world.rank() == 1) {
            if (by_exception) throw std::runtime_error("no luck");
            return;
          }
          try {
            world.recover("the loss is NaN");
          } catch (const CommError& error) {
            heard[static_cast<std::size_t>(world.rank())] = error.what();
            throw;
          }
        });
      };
      CHECK_THROWS_WITH(run(), by_exception ? Contains("no luck") : Contains("rank 1 has ended"));
      for (const int rank : {0, 2})
        CHECK_THAT(heard[static_cast<std::size_t>(rank)], Contains("rank 1"));
    }
}

TEST_CASE("halves of a recovery: ranks agree on numbers while they meet", "[comm][threads]") {
  run_checked(3, {.threads = 1}, [&](World& world) {
    for (int round = 0; round < 5; ++round) {
      double numbers[] = {static_cast<double>(world.rank()), -static_cast<double>(world.rank())};
      world.halt("a test");
      world.resume(numbers);
      expect(numbers[0] == 2 && numbers[1] == 0, "each becomes the largest");
    }
  });
  World alone = World::single();
  std::vector<double> too_many(World::kAgreed + 1);
  CHECK_THROWS_WITH(alone.resume(too_many), Contains("give at most"));
}
