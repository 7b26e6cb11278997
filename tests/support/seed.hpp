// Where the seeds of random tests come from.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>

namespace tessera::testing {

// Another one at each call, for a test to print; with SEED=N in the environment N, so that a
// failure can be had again: SEED=N tools/test NAME.
inline std::uint64_t fresh_seed() {
  const char* const text = std::getenv("SEED");
  return text ? std::strtoull(text, nullptr, 10) : std::random_device{}();
}

}  // namespace tessera::testing
