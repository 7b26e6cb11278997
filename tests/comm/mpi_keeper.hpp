// What the cases that run under mpirun share. Every rank runs all cases in the same order; one that
// fails on one rank alone ends its world, so the others fail too instead of waiting.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"
#include "tests/support/seed.hpp"

// Keeps MPI alive while the worlds of the cases come and go, also those that fail.
inline tessera::World& keeper() {
  static tessera::World world = tessera::World::mpi();
  return world;
}

inline std::uint64_t agreed_seed() {
  return static_cast<std::uint64_t>(
      keeper().max(static_cast<double>(tessera::testing::fresh_seed())));
}

// All ranks but the first, backwards; the first alone.
inline std::vector<int> others(const tessera::World& world) {
  std::vector<int> ranks;
  for (int r = world.size() - 1; r > 0; --r) ranks.push_back(r);
  return world.rank() == 0 ? std::vector<int>{0} : ranks;
}

// What a world of its own throws out of `body`: "CommError: ...", "ContractError: ...", or
// another's text. Not under the race checker: what fails gives memory back while work that no
// longer runs is due on it.
inline std::string thrown(const std::function<void(tessera::World&)>& body,
                          const tessera::WorldOptions& options = {}) {
  try {
    tessera::World world = tessera::World::mpi(options);
    body(world);
    world.device().synchronize();
  } catch (const tessera::CommError& error) {
    return tessera::concat("CommError: ", error.what());
  } catch (const tessera::ContractError& error) {
    return tessera::concat("ContractError: ", error.what());
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}
