// A failure that no host call waits for is an exit code all the same; mpi_exit_code_test.cpp says
// so of processes.
#include "tests/promises/unread_step.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("a failure behind the last value that is read ends a program of threads with 1",
          "[exceptions][threads]") {
  std::uint64_t places = 0;
  CHECK(exit_code_of({.threads = 2}, &places) == 0);
  for (const Trap trap : {Trap::launch, Trap::body})
    for (std::uint64_t k = first_place(places); k <= places; k += 7 * stride()) {
      INFO(name(trap) << ' ' << k << " of " << places);
      CHECK(exit_code_of({.threads = 2, .trap = trap, .place = k, .trapped = int(k % 2)}) == 1);
    }
}
