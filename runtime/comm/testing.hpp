// What only tests ask of a world: whether a schedule comes again.
#pragma once

#include <cstdint>

namespace tessera {

// The trace hash of the last `shuffled` run_local on this thread, 0 after any other; see
// runtime/device/testing.hpp.
std::uint64_t last_trace_hash();

}  // namespace tessera
