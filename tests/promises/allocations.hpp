// What the program has asked of operator new so far, on all threads, and how to refuse it some.
#pragma once

#include <cstdint>

namespace tessera::testing {

struct Allocations {
  std::int64_t made = 0, freed = 0;
  std::int64_t held_bytes = 0;  // of blocks that are not freed, as large as malloc made them
  std::int64_t peak_bytes = 0;  // of held_bytes, since the last reset_peak_of_allocations()
};
Allocations allocations();
void reset_peak_of_allocations();
// Of this thread, operator new throws std::bad_alloc from the n-th allocation on; for a negative n
// none.
void refuse_allocations(std::int64_t from);

}  // namespace tessera::testing
