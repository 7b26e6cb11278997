// Finds, loads and checks a driver module. Called once for each CUDA device that is made; a process
// on the CPU never comes here.
#pragma once

#include <string>

#include "tessera/detail/device/driver.hpp"

namespace tessera {

// The driver in the file `module`, or, where that is empty, in libtessera-cuda.so: in the folder of
// this library or program, in ../lib from there, in kernels/cuda of a build folder, or where the
// dynamic linker looks. Stays loaded to the end of the process. The calling thread uses device
// `index` from here on.
//
// Throws: DeviceError where the module is absent or cannot be loaded, was built from another
// version of this library or for another list of kernels than `kernels_layout`, or cannot use the
// device.
const Driver& open_driver(const std::string& module, std::uint64_t kernels_layout, int index);

}  // namespace tessera
