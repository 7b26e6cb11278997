// Random programs on ranks that are processes. Run under mpirun; every rank runs all of them.
#include "tests/comm/mpi_keeper.hpp"
#include "tests/promises/run_program.hpp"
#include "tests/support/race_check.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("mpi: random programs leave the bits of one rank", "[promises][mpi]") {
  if (keeper().size() == 3) {
    WARN("skipped: random programs have 1, 2 or 4 ranks, by which their means are exact");
    return;
  }
  std::uint64_t seed = agreed_seed();
  for (std::uint64_t left = std::max<std::uint64_t>(1, 400 / stride()); left > 0; ++seed) {
    Program program = make_program(seed);
    if (program.ranks != keeper().size()) continue;
    --left;
    for (const Transport transport : {Transport::automatic, Transport::messages}) {
      INFO("SEED=" << seed << " again, over "
                   << (transport == Transport::messages ? "messages" : "shared memory"));
      const Values expected = on_one_rank(program);
      const RaceCheck check;
      World world = World::mpi(
          check({.executor = seed % 4 == 0 ? ExecutorKind::inlined : ExecutorKind::threaded,
                 .threads = 1,
                 .transport = transport}));
      const Values found = on_rank(program, world);
      if (world.rank() == 0) CHECK(difference(expected, found).empty());
    }
  }
}
