// A driver module and one of its devices, opened for a check: no library of ours between.
#pragma once

#include <string>

#include "tests/kernels/target.hpp"

namespace tessera::gpu_check {

// A stream and a workspace of 32 MiB on a device of a module. They end with the process.
//
// Throws: DeviceError with the module's or the loader's own words.
kernel_test::Target open_module(const std::string& path, int device);

// Throws: DeviceError unless `error` is null.
void expect(DriverError error, const char* what);

}  // namespace tessera::gpu_check
