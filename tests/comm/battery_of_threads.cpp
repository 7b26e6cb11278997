#include "tests/comm/battery.hpp"
#include "tests/support/race_check.hpp"

namespace battery {

std::vector<std::uint64_t> hashes_of_threads(int ranks, std::uint64_t seed) {
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>(ranks));
  tessera::testing::run_checked(ranks, {}, [&](tessera::World& world) {
    hashes[static_cast<std::size_t>(world.rank())] = run(world, seed).hash;
  });
  return hashes;
}

}  // namespace battery
