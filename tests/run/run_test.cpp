// The pieces of ts::run that a program with its own way to report is made of.
#include "tessera/run/run.hpp"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <source_location>
#include <stdexcept>

#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using Catch::Matchers::Contains;

namespace {

int code_of(const auto& thrown) { return exit_code(std::make_exception_ptr(thrown)); }

}  // namespace

TEST_CASE("bad input ends a program with 2, anything else with 1", "[run]") {
  CHECK(code_of(DataError("no such file")) == 2);
  CHECK(code_of(ContractError("wrong shape")) == 1);
  CHECK(code_of(std::runtime_error("theirs")) == 1);
  CHECK(code_of(3) == 1);
  try {
    throw DataError("in flight");
  } catch (...) {
    CHECK(exit_code() == 2);
  }
}

TEST_CASE("ranks are threads of this process, or one where nobody asks for more", "[run]") {
  for (const std::optional<int> ranks : {std::optional<int>(), std::optional<int>(3)}) {
    std::atomic<int> calls{0}, sizes{0};
    run_ranks({}, ranks, {.threads = 1}, [&](World& world) {
      calls += 1 + 10 * world.rank();
      sizes += world.size();
    });
    CHECK(calls == (ranks ? 3 + 10 + 20 : 1));
    CHECK(sizes == (ranks ? 9 : 1));
  }
}

TEST_CASE("what a rank throws comes out of run_ranks, and so does a launcher that does not fit",
          "[run]") {
  try {
    run_ranks({}, 2, {.threads = 1}, [](World& world) {
      if (world.rank() == 1) throw DeviceError("the second rank's own");
      world.barrier();
    });
    FAIL("nothing was thrown");
  } catch (const DeviceError& error) {
    CHECK(error.rank() == 1);
    CHECK_THAT(error.what(), Contains("the second rank's own"));
  }
  LaunchEnvironment launched;
  launched.launcher = Launcher::open_mpi;
  launched.world_size = 2;
  CHECK_THROWS_AS(run_ranks(launched, 2, {}, [](World&) {}), DataError);
  CHECK_THROWS_AS(run_ranks(launched, {}, {.device = {.kind = DeviceKind::cuda}}, [](World&) {}),
                  DataError);
}

TEST_CASE("a program ends with 1 where nobody waits for what failed, and whatever was thrown",
          "[run]") {
  for (const int ranks : {1, 2}) {
    CHECK(run({.program = "tests", .ranks = ranks}, [](World& world) {
            const Stream compute = world.device().compute();
            if (world.rank() == 0) compute.launch({.name = "unlucky"}, [](Exec&) { throw 3; });
          }) == 1);
    CHECK(run({.program = "tests", .ranks = ranks}, [](World&) { throw 3; }) == 1);
  }
}

TEST_CASE("a program's error line ends with the line that called the operation", "[run]") {
  std::FILE* const written = std::tmpfile();
  const int before = ::dup(STDERR_FILENO);
  std::fflush(stderr);
  ::dup2(::fileno(written), STDERR_FILENO);
  std::uint_least32_t line = 0;
  const int code = run({.program = "tests"}, [&](World&) {
    const auto operation = [](Caller at = Caller::current()) {
      CallSite site("sum", at);
      TESSERA_EXPECT(false, "no");
    };
    line = std::source_location::current().line() + 1;
    operation();
  });
  std::fflush(stderr);
  ::dup2(before, STDERR_FILENO);
  ::close(before);
  char text[200] = {};
  std::rewind(written);
  CHECK(std::fread(text, 1, sizeof(text) - 1, written) > 0);
  std::fclose(written);
  CHECK(code == 1);
  CHECK(std::string(text) == concat("tests: error: rank 0: sum: no (run_test.cpp:", line, ")\n"));
}
