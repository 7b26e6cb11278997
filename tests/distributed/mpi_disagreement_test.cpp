// Processes whose units differ. Run under mpirun.
#include "tests/comm/mpi_keeper.hpp"
#include "tests/shard/differences.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::StartsWith;

TEST_CASE("mpi: processes whose units differ are told what differs, before anything is submitted",
          "[distributed][mpi]") {
  const World world = World::mpi({.threads = 1});
  std::vector<DeviceMesh> meshes = {DeviceMesh::flat(world)};
  if (world.size() % 2 == 0) meshes.push_back(DeviceMesh::hybrid(world, {2, world.size() / 2}));
  for (const DeviceMesh& mesh : meshes)
    for (const int odd : {0, world.size() - 1})
      for (const Difference& difference : differences()) {
        INFO("rank " << odd << " of " << mesh.replicas() << " x " << mesh.shard_size());
        CHECK_THAT(heard_of(difference, world, mesh, odd),
                   StartsWith("fully_shard: " + difference.says));
      }
}
