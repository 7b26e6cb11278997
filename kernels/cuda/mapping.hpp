// Addresses that are reserved first and given memory later, by libcuda's own calls. The entries of
// the same names of Driver, which says what they do; on the calling thread's device.
#pragma once

#include <cstdint>

#include "tessera/detail/device/driver.hpp"

namespace tessera::kernels::cuda {

constexpr int kMostDevices = 64;

// From now on what is mapped on device `peer` is opened to `device`, which reaches its memory.
// Both are below kMostDevices.
void note_reader(int device, int peer);

DriverError granularity(std::int64_t* bytes);
DriverError reserve(std::int64_t bytes, void** range);
DriverError free_range(void* range, std::int64_t bytes);
DriverError map(void* at, std::int64_t bytes, bool* mapped);
DriverError unmap(void* at, std::int64_t bytes);

}  // namespace tessera::kernels::cuda
