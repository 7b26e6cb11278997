// Whole state and handles over ranks that are processes. Run under mpirun; every rank runs all
// cases in the same order.
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/distributed/state.hpp"
#include "tests/comm/mpi_keeper.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr Transport kTransports[] = {Transport::automatic, Transport::messages};

struct Job {
  explicit Job(const World& world) : optimizer((shard(world), model.parameters()), {.lr = 0.1}) {}
  void shard(const World& world) { model.shard({.mesh = DeviceMesh::flat(world)}); }
  void train(const World& world, std::uint64_t seed) {
    mean_square(model(rows_of(seed, 0, 6, 4, world.device()))).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  Stack model{{4, 150, 130}};  // a weight is more than is staged
  optim::AdamW optimizer;
};

Values values_of(const StateDict& state) {
  Values values;
  for (const auto& [name, entry] : state)
    if (entry.values.dtype() == f32) values[name] = entry.values.to_vector<float>();
  return values;
}

}  // namespace

TEST_CASE("mpi: whole state is gathered, sent from rank 0 and the same in other processes",
          "[distributed][mpi]") {
  const std::uint64_t seed = agreed_seed();
  INFO("seed " << seed);
  for (const Transport transport : kTransports) {
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1, .transport = transport}));
    Job first(world);
    first.model.materialize(world.device());
    nn::init(first.model, {seed});
    first.train(world, seed);
    const StateDictOptions options{StateForm::full, StateRanks::rank_0, StateMemory::host};
    const StateDict weights = first.model.state_dict(options),
                    kept = first.optimizer.state_dict(first.model, options);
    CHECK(weights.empty() == (world.rank() > 0));
    Job second(world);
    second.model.load(weights, {.from_rank_0 = &world});
    second.optimizer.load(second.model, kept, {.from_rank_0 = &world});
    const Values all = values_of(second.optimizer.state_dict(second.model, {StateForm::full}));
    CHECK(same_bits(values_of(second.model.state_dict({StateForm::full})),
                    values_of(first.model.state_dict({StateForm::full}))));
    if (world.rank() == 0) CHECK(same_bits(all, values_of(kept)));
    CHECK(second.optimizer.steps() == 1);
    for (const auto& [name, p] : second.model.named_parameters())
      CHECK(same_bits(second.optimizer.distributed_moments(p)[0].full().to_vector<float>(),
                      all.at(name + ".exp_avg")));
    world.barrier();
  }
}

TEST_CASE("mpi: tensors are spread, summed and put together again", "[distributed][mpi]") {
  for (const Transport transport : kTransports) {
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1, .transport = transport}));
    const DeviceMesh mesh = DeviceMesh::flat(world);
    for (const std::int64_t rows : {5, 20001}) {
      const auto filled = [&](std::int64_t count, double value) {
        return std::vector<float>(static_cast<std::size_t>(2 * count), static_cast<float>(value));
      };
      const Tensor own = Tensor::full({rows, 2}, 1 + world.rank(), f32, world.device());
      const auto spread = distribute(own, mesh, {Shard{}});
      CHECK(spread.local().to_vector<float>() == filled(spread.rows().size(), 1));
      CHECK(spread.full().to_vector<float>() == filled(rows, 1));
      const DistributedTensor terms(own, {rows, 2}, mesh, {Partial{}});
      CHECK(terms.full().to_vector<float>() ==
            filled(rows, world.size() * (world.size() + 1) / 2.));
    }
    world.barrier();
  }
}
