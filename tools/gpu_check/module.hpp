// A driver module and one of its devices, opened for a check: no library of ours between.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/device/driver.hpp"

namespace tessera::gpu_check {

// A stream and a workspace on a device of a module. Ends with the process.
struct Opened {
  const Driver* driver = nullptr;
  DriverDevice device{};
  void* stream = nullptr;
  void* workspace = nullptr;
  std::int64_t workspace_bytes = std::int64_t{32} << 20;
};

// Throws: DeviceError with the module's or the loader's own words.
Opened open_module(const std::string& path, int device);

// Throws: DeviceError unless `error` is null.
void expect(DriverError error, const char* what);

// The host sleeps until all that was queued on the stream has run.
void drain(const Opened& opened);

}  // namespace tessera::gpu_check
