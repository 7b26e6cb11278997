// Ranks that are processes on two hosts and more, which one machine stands for: what they train.
// Run under mpirun; every rank runs all cases in the same order.
#include "tests/comm/mpi_hosts.hpp"
#include "tests/promises/support.hpp"
#include "tests/support/race_check.hpp"

using namespace tessera;
using namespace tessera::testing;

// Bounds: on one host and on two the same gradients are added in another order, as on N ranks and
// on one: those of tests/promises/parity_test.cpp.
TEST_CASE("mpi: ranks on two hosts train to the losses of one host", "[promises][mpi]") {
  const std::uint64_t seed = agreed_seed();
  std::mt19937_64 draw(seed);
  constexpr int kSteps = 6;
  for (int trial = 0; trial < 12; ++trial) {
    const std::vector<Cell> all = trial < 8 ? cells() : narrow_cells();
    const Cell cell = all[draw() % all.size()];
    const Hosts hosts = draw_hosts(draw);
    INFO(cell << ", " << to_string(hosts) << ", seed " << seed);
    const auto train_on = [&](const Hosts& on) {
      const PretendedHosts pretended(on);
      const RaceCheck check;
      World world = World::mpi(check({.threads = 1}));
      CHECK(world.sums_are_ordered() == (on.empty() || is_flat(on)));
      return train(world, cell, seed, kSteps);
    };
    const Trained one = train_on({}), two = train_on(hosts);
    CHECK(std::abs(one.losses[0] - two.losses[0]) < 1e-5);
    CHECK(worst(one.losses, two.losses) < (trial < 8 ? 1e-5 : 1e-2));
    if (trial < 8) CHECK(worst(one.norms, two.norms) < 1e-4 * largest(one.norms));
  }
}
