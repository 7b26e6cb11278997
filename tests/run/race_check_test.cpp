// TESSERA_CHECK: who reads it, what it takes, and what a race does to the exit code.
#include "tessera/run/race_check.hpp"

#include <cstdlib>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/run/run.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using Catch::Matchers::Contains;

namespace {

std::shared_ptr<RaceChecker> with(const char* value) {
  return race_checker_from([value](const char* variable) {
    return std::string("TESSERA_CHECK") == variable ? value : nullptr;
  });
}

// Two ranks; with a race the gather stream reads a tensor that compute may still write.
int program(bool races, const std::shared_ptr<RaceChecker>& checker = nullptr) {
  const RunOptions options{.program = "test", .ranks = 2, .world = {.race_checker = checker}};
  return run(options, [races](World& world) {
    const OwnerGuard owner(world.device(), "table");
    const Tensor x = Tensor::ones({8}, f32, world.device());
    const Stream gather = world.device().gather();
    if (!races) gather.wait(world.device().compute().record());
    const Access access = x.access(AccessMode::read);
    gather.launch({.name = "peek", .accesses = {&access, 1}}, [](Exec&) {});
    world.device().compute().wait(gather.record());
  });
}

}  // namespace

TEST_CASE("TESSERA_CHECK is 1, 0 or nothing", "[run]") {
  CHECK(with("1") != nullptr);
  for (const char* off : {static_cast<const char*>(nullptr), "", "0"}) CHECK(with(off) == nullptr);
  CHECK_THROWS_AS(with("yes"), DataError);
  CHECK_THROWS_WITH(with("yes"),
                    "TESSERA_CHECK='yes' is neither 0 nor 1; set 1 to look for races, "
                    "or unset it");
}

TEST_CASE("under TESSERA_CHECK=1 a race makes the exit code 1", "[run]") {
  ::setenv("TESSERA_CHECK", "1", 1);
  CHECK(program(true) == 1);
  CHECK(program(false) == 0);
  ::setenv("TESSERA_CHECK", "2", 1);
  CHECK(program(false) == 2);
  ::unsetenv("TESSERA_CHECK");
  CHECK(program(true) == 0);  // nobody looks
}

TEST_CASE("a program closes with the operations, streams, owner and missing edge of each race",
          "[run]") {
  const auto checker = RaceChecker::make();
  CHECK(program(true, checker) == 1);
  for (const int rank : {0, 1}) {
    std::vector<std::string> races, summaries;
    const auto to = [](std::vector<std::string>& lines) {
      return [&lines](const std::string& line) { lines.push_back(line); };
    };
    CHECK(close_check(checker.get(), rank, 0, to(races), to(summaries)) == 1);
    CHECK(close_check(checker.get(), rank, 2, [](const auto&) {}, [](const auto&) {}) == 2);
    REQUIRE(races.size() == 2);  // one of each rank
    for (const std::string& race : races)
      CHECK_THAT(race, Contains("race on 32 bytes of 'table'") && Contains("'peek' on gather") &&
                           Contains("'fill' on compute") &&
                           Contains("make gather wait for compute's tick 1, the end of 'fill'"));
    // Of each rank a fill and a peek.
    CHECK(summaries == (rank == 0 ? std::vector<std::string>{"race checker: 4 operations, 2 races"}
                                  : std::vector<std::string>{}));
  }
  const auto never = [](const std::string&) { FAIL("nobody has looked"); };
  CHECK(close_check(nullptr, 0, 0, never, never) == 0);
}
