// A stream of a driver module's device, on which kernels are called with no library of ours
// between: by the cases, and by tools/gpu-check.
#pragma once

#include <cstdint>

#include "tessera/device/driver.hpp"
#include "tessera/device/op.hpp"

namespace cuda_test {

using namespace tessera;

struct Target {
  const Driver* driver = nullptr;
  void* stream = nullptr;
  void* workspace = nullptr;
  std::int64_t workspace_bytes = 0;

  // What a kernel that is queued here sees.
  Exec exec() const {
    Exec exec;
    exec.driver = driver;
    exec.native_stream = stream;
    exec.workspace = workspace;
    exec.workspace_bytes = static_cast<std::size_t>(workspace_bytes);
    return exec;
  }

  // The host sleeps until all that was queued here has run.
  DriverError drain() const {
    void* event = nullptr;
    if (const DriverError error = driver->make_event(&event)) return error;
    DriverError error = driver->record(event, stream);
    if (!error) error = driver->block(event);
    const DriverError at_end = driver->end_event(event);
    return error ? error : at_end;
  }
};

}  // namespace cuda_test
