// Loss scaling over ranks that are processes. Run under mpirun; every rank runs all cases in the
// same order.
#include "tessera/optim/grad_scaler.hpp"
#include "tests/comm/mpi_keeper.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("mpi: an inf in another process skips the step here, too", "[distributed][mpi]") {
  for (const Transport transport : {Transport::automatic, Transport::messages}) {
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1, .transport = transport}));
    Stack model({4, 5, 3});
    model.shard({.mesh = DeviceMesh::flat(world)});
    nn::init(model, {3}, world.device());
    optim::AdamW optimizer(model.parameters());
    optim::GradScaler scaler(world.device(), {.init_scale = 1024});
    const auto step = [&](bool overflows) {
      const Tensor x = rows_of(3, 2 * world.rank(), 2, 4, world.device());
      scaler.scale(mean_square(model(x))).backward();
      if (overflows && world.rank() == 1) spoil_gradient(model, NAN);
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
      return full_values(model);
    };
    const Values first = step(false), second = step(true), third = step(false);
    CHECK(same_bits(first, second));
    CHECK(!same_bits(second, third));
    CHECK(optimizer.steps() == 2);
    CHECK(scaler.current_scale().item() == 512);
    world.barrier();
  }
}
