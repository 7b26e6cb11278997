// TESSERA_CHECK: who reads it, what it takes, and what a race does to the exit code.
#include "tessera/run/race_check.hpp"

#include <cstdlib>
#include <string>

#include "tessera/base/error.hpp"
#include "tessera/run/run.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;

namespace {

std::shared_ptr<RaceChecker> with(const char* value) {
  return race_checker_from([value](const char* variable) {
    return std::string("TESSERA_CHECK") == variable ? value : nullptr;
  });
}

// Two ranks; with a race the gather stream reads a tensor that compute may still write.
int program(bool races) {
  return run({.program = "test", .ranks = 2, .world = {}}, [races](World& world) {
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
