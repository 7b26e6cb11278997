// What the program has asked of operator new so far, on all threads.
#pragma once

#include <cstdint>

namespace tessera::testing {

struct Allocations {
  std::int64_t made = 0, freed = 0;
  std::int64_t held_bytes = 0;  // of blocks that are not freed, as large as malloc made them
};
Allocations allocations();

}  // namespace tessera::testing
