// Where a case runs its kernels: a stream of a driver module's device, with no library of ours
// between, or the CPU. For the cases, and for tools/gpu-check.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>

#include "kernels/kernel_table.hpp"
#include "tessera/detail/device/driver.hpp"
#include "tessera/device/op.hpp"
#include "tessera/device/workers.hpp"

namespace kernel_test {

using namespace tessera;

struct Target {
  const Driver* driver = nullptr;           // null: the CPU
  const kernels::Kernels* table = nullptr;  // null: the driver's, or the CPU's
  WorkerPool* workers = nullptr;            // of the CPU, for every second run
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

  DriverError allocate(std::int64_t bytes, void** data) const {
    if (driver) return driver->allocate(bytes, data);
    *data = ::operator new(static_cast<std::size_t>(bytes), std::align_val_t{256});
    return nullptr;
  }
  void release(void* data) const {
    driver ? static_cast<void>(driver->release(data))
           : ::operator delete(data, std::align_val_t{256});
  }
  DriverError copy(void* to, const void* from, std::int64_t bytes) const {
    if (driver) return driver->copy(to, from, bytes, stream);
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    return nullptr;
  }
  DriverError fill(void* to, std::uint8_t byte, std::int64_t bytes) const {
    if (driver) return driver->fill(to, byte, bytes, stream);
    std::memset(to, byte, static_cast<std::size_t>(bytes));
    return nullptr;
  }

  // The host sleeps until all that was queued here has run.
  DriverError drain() const {
    if (!driver) return nullptr;
    void* event = nullptr;
    if (const DriverError error = driver->make_event(&event)) return error;
    DriverError error = driver->record(event, stream);
    if (!error) error = driver->block(event);
    const DriverError at_end = driver->end_event(event);
    return error ? error : at_end;
  }
};

}  // namespace kernel_test
