// What a launch may ask of the calling thread's device. Defined beside the driver table: in
// driver.cpp by the CUDA runtime.
#pragma once

#include <cstddef>

namespace tessera::kernels::cuda {

// At least 1. The runtime knows it: no call to the device, and nothing waits.
int multiprocessors();
// Shared memory that a block may have, at least kSharedBytes; as cheap.
std::size_t most_shared_bytes();
// Whether kernels/*_hopper.cu run there: on sm_90, where the module has code for it.
bool has_warpgroup_products();

}  // namespace tessera::kernels::cuda
