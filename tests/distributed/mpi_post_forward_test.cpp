// Parts over neighbours between forward and backward, in ranks that are processes. Run under
// mpirun; every rank runs all cases in the same order.
#include "tests/comm/mpi_keeper.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;

// On 2 and 3 ranks there are no such neighbours, and both ways are one.
TEST_CASE("mpi: parts over neighbours train to the bits of full shards", "[distributed][mpi]") {
  for (const Transport transport : {Transport::automatic, Transport::messages}) {
    const auto values = [&](Reshard reshard) {
      const RaceCheck check;
      World world = World::mpi(check({.threads = 1, .transport = transport}));
      const DeviceMesh mesh = DeviceMesh::flat(world);
      Stack model({4, 5, 3});
      model.shard({.mesh = mesh, .reshard_after_forward = reshard_on(mesh, reshard)});
      nn::init(model, {3}, world.device());
      optim::AdamW optimizer(model.parameters());
      for (std::uint64_t k = 0; k < 3; ++k) {
        mean_square(model(rows_of(k, 2 * world.rank(), 2, 4, world.device()))).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      return full_values(model);
    };
    CHECK(same_bits(values(Reshard::to(2)), values(Reshard::always)));
  }
}
