// Ranks that are processes beside ranks that are threads. Run under mpirun; every rank runs all
// cases in the same order.
#include "tests/comm/mpi_keeper.hpp"
#include "tests/promises/tiny_step.hpp"
#include "tests/support/race_check.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("mpi: processes train to the bits of threads, in every configuration of schedules",
          "[promises][mpi]") {
  const std::uint64_t seed = agreed_seed();
  const auto rank = static_cast<std::size_t>(keeper().rank());
  for (const TinyConfig& config : kTinyConfigs) {
    if (config.ranks != keeper().size()) continue;
    const auto threads = train(config, {.threads = 1}, seed).bits[rank];
    for (const Transport transport : {Transport::automatic, Transport::messages}) {
      INFO(config.name << ", seed " << seed << ", "
                       << (transport == Transport::messages ? "messages" : "shared memory"));
      const RaceCheck check;
      const World world = World::mpi(check({.threads = 1, .transport = transport}));
      CHECK(TinyStep(world, config, seed).train() == threads);
    }
  }
}
