// The executors that run what they are given: what holds on one holds on all.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/device/device.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/support/catch.hpp"

namespace tessera::testing {

inline std::vector<ExecutorChoice> threaded_and_shuffled(std::uint64_t seed = 0) {
  return {ExecutorKind::threaded, shuffled(seed)};
}

inline std::vector<ExecutorChoice> executors(std::uint64_t seed = 0) {
  return {ExecutorKind::threaded, ExecutorKind::inlined, shuffled(seed)};
}

// Each of `executors` in turn: the case runs once for each.
inline ExecutorChoice any_executor(std::uint64_t seed = 0) {
  return executors(seed)[GENERATE(as<std::size_t>{}, 0, 1, 2)];
}

// With that of plans.
inline ExecutorChoice any_or_virtual() {
  std::vector<ExecutorChoice> all = executors();
  all.emplace_back(ExecutorKind::virtual_);
  return all[GENERATE(as<std::size_t>{}, 0, 1, 2, 3)];
}

}  // namespace tessera::testing
