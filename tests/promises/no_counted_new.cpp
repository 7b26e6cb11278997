// The twin of counted_new.cpp: nothing is counted, nor refused.
#include "tests/promises/allocations.hpp"

tessera::testing::Allocations tessera::testing::allocations() { return {}; }
void tessera::testing::reset_peak_of_allocations() {}
void tessera::testing::refuse_allocations(std::int64_t) {}
