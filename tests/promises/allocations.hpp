// What the program has asked of operator new so far, on all threads.
#pragma once

#include <cstdint>

namespace tessera::testing {

struct Allocations {
  std::int64_t made = 0, freed = 0;
};
Allocations allocations();

}  // namespace tessera::testing
