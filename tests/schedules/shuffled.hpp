// Schedules that follow from a seed, for tests of your own operations: what a program forgot to
// order shows, and the seed shows it again.
//
//   for (std::uint64_t seed = 0; seed < 100; ++seed) {
//     const Device device = Device::cpu({.executor = testing::shuffled(seed)});
//     ...
//   }
//   run_local(4, {.executor = testing::shuffled(seed)}, [](World& world) { ... });
//
// Of all ranks of a world one host thread or one operation runs at a time. At every point where a
// host thread blocks, the seed chooses what goes on.
#pragma once

#include <cstdint>

#include "tessera/device/executor.hpp"

namespace tessera::testing {

// For CpuOptions and WorldOptions: the same program and the same seed have the same schedule. Each
// device, and each call of run_local, begins it anew. `trace`, which outlives them, becomes FNV-1a
// over (rank, stream, name) of all operations in the order in which they ran, once the last rank
// has ended. Throws, where the device is made: ContractError for a cost model, or bodies of a plan.
// Throws from `block`: DeviceError where no rank can go on, with what each waits for.
ExecutorChoice shuffled(std::uint64_t seed, std::uint64_t* trace = nullptr);

}  // namespace tessera::testing
