// Hooks behind reductions whose ranks are processes. Run under mpirun.
#include "tessera/distributed/collectives.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/comm/mpi_keeper.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("mpi: a hook sums what was reduced over a group of processes",
          "[distributed][mpi][fsdp2-022]") {
  const std::uint64_t seed = agreed_seed();
  INFO("seed " << seed);
  for (const Transport transport : {Transport::automatic, Transport::messages}) {
    const RaceCheck check;
    const World world = World::mpi(check({.threads = 1, .transport = transport}));
    Stack model({4, 15, 13});
    model.shard({.mesh = DeviceMesh::flat(world), .piece_bytes = 1});
    nn::init(model, {seed}, world.device());
    // Flat gradients of all units: chunks are as long on every rank, though their rows are others.
    const auto gradients = [&] {
      mean_square(model(rows_of(seed, 2 * world.rank(), 2, 4, world.device()))).backward();
      std::vector<std::vector<float>> all;
      for (nn::Module* unit :
           {static_cast<nn::Module*>(&model.layers[0]), static_cast<nn::Module*>(&model.layers[1]),
            static_cast<nn::Module*>(&model)}) {
        FlatGroup& group = *state_of(unit->own_parameters()[0].second)->group;
        all.push_back(group.await_gradient().to_vector<float>());
      }
      optim::SGD(model.parameters(), {.lr = 0}).zero_grad();
      return all;
    };
    const auto plain = gradients();
    int calls = 0;
    for (nn::Linear& layer : model.layers)
      set_all_reduce_hook(layer, [&](const ReducedGradient& g) {
        ++calls;
        for (const Tensor& x : {g.values, g.counts}) {
          const Access access = x.access(AccessMode::write);
          world.reduce().submit({.send = x.data(),
                                 .recv = x.data(),
                                 .count = x.numel(),
                                 .kind = CollectiveKind::all_reduce},
                                "sum of a hook", {&access, 1});
        }
      });
    const auto hooked = gradients();
    CHECK(calls == 4);  // a piece for each weight and each bias
    for (std::size_t unit = 0; unit < plain.size(); ++unit) {
      const bool has_hook = unit < 2;
      const Tensor own = Tensor::from(plain[unit], {static_cast<std::int64_t>(plain[unit].size())},
                                      world.device());
      const Tensor expected = has_hook ? dist::all_reduce(own, world) : own;
      CHECK(same_bits(hooked[unit], expected.to_vector<float>()));
    }
  }
}
