// The behaviour suite of communicators: every kind of collective, on every dtype, on uneven counts,
// in place and out of place, alone (a share of them, support/share.hpp) and together, held against
// a long double reference. Any world or group of ranks can run it; those of the same size must come
// to the same hash.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/world.hpp"

namespace battery {

struct Result {
  std::uint64_t hash = 0;           // over all bytes received, by this rank
  std::uint64_t control = 0;        // over those of `control` alone
  std::vector<std::string> errors;  // empty when every value is within its bound
};

// Inputs are drawn from `seed`, which is the same on all ranks. Ends with the device idle. Does not
// assert, because it runs on threads, and on a GPU where no test framework is.
Result run(const tessera::RankGroup& group, std::uint64_t seed);

// What it comes to on each of so many ranks that are threads, under the race checker.
std::vector<std::uint64_t> hashes_of_threads(int ranks, std::uint64_t seed);

}  // namespace battery
