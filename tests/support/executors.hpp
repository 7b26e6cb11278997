// The executors that run what they are given: what holds on one holds on all.
#pragma once

#include <iterator>

#include "tessera/device/device.hpp"
#include "tests/support/catch.hpp"

namespace tessera::testing {

inline constexpr ExecutorKind kExecutors[] = {ExecutorKind::threaded, ExecutorKind::inlined,
                                              ExecutorKind::shuffled};

// Each in turn: the case runs once for each.
inline ExecutorKind any_kind() {
  return GENERATE(from_range(std::begin(kExecutors), std::end(kExecutors)));
}

}  // namespace tessera::testing
