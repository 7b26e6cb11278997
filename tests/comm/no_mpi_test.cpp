// A build without MPI says so, and what to do about it.
#include "tessera/comm/world.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using Catch::Matchers::Contains;

TEST_CASE("without MPI, World::mpi names the remedy", "[comm]") {
  CHECK_THROWS_AS(World::mpi(), CommError);
  CHECK_THROWS_WITH(World::mpi(), Contains("libopenmpi-dev") && Contains("-Dmpi=enabled"));
}
