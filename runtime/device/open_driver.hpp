// Finds, loads and checks a driver module. Called once for each CUDA device that is made; a process
// on the CPU never comes here.
#pragma once

#include <string>

#include "tessera/detail/device/driver.hpp"

namespace tessera {

// The file of one of our modules: in the folder of this library or program, in ../lib from there,
// or in `build_folder` of a build. Where it is in none of them, its bare name, which is left to the
// dynamic linker, and `looked` says where it is not.
std::string find_module(const std::string& name, const std::string& build_folder,
                        std::string& looked);

// The driver in the file `module`, or, where that is empty, in libtessera-cuda.so: in the folder of
// this library or program, in ../lib from there, in kernels/cuda of a build folder, or where the
// dynamic linker looks. Stays loaded to the end of the process. The calling thread uses device
// `index` from here on.
//
// Throws: DeviceError where the module is absent or cannot be loaded, was built from another
// version of this library or for another list of kernels than `kernels_layout`, or cannot use the
// device.
const Driver& open_driver(const std::string& module, std::uint64_t kernels_layout, int index);
// The driver alone, for who has no device yet: it looks at none, since a look makes a context.
const Driver& open_driver(const std::string& module, std::uint64_t kernels_layout);

}  // namespace tessera
