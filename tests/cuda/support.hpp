// An emulated GPU for tests of what lies above the driver table: a module whose kernels are the
// CPU's, queued, and what it counts.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device.hpp"
#include "tests/emulator/control.hpp"

namespace tessera::testing {

using kernels::cuda::emulator::Control;
using kernels::cuda::emulator::Counts;

inline const Control& emulator(const char* path = TESSERA_QUEUED_MODULE) {
  void* const module = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!module) throw std::runtime_error(dlerror());
  return *reinterpret_cast<kernels::cuda::emulator::ControlEntry>(
      dlsym(module, kernels::cuda::emulator::kControlSymbol))();
}

inline Counts counts() {
  Counts now{};
  emulator().counts(&now);
  return now;
}

// In its scope each piece of queued work starts late, by up to `most_us`.
struct Delays {
  explicit Delays(std::uint64_t seed, std::int32_t most_us = 200) {
    emulator().delay(seed, most_us);
  }
  ~Delays() { emulator().delay(0, 0); }
  Delays(const Delays&) = delete;
  Delays& operator=(const Delays&) = delete;
};

// In its scope there are so many GPUs, which reach each other's memory or do not.
struct Gpus {
  explicit Gpus(int count, bool reach = true) { emulator().devices(count, reach); }
  ~Gpus() { emulator().devices(1, true); }
  Gpus(const Gpus&) = delete;
  Gpus& operator=(const Gpus&) = delete;
};

inline Device queued_gpu(int rank = 0, CudaMemory memory = CudaMemory::pieces) {
  return Device::cuda({.rank = rank, .memory = memory, .module = TESSERA_QUEUED_MODULE});
}
inline WorldOptions on_gpu(CudaMemory memory = CudaMemory::pieces) {
  return {.device = {.kind = DeviceKind::cuda, .memory = memory, .module = TESSERA_QUEUED_MODULE},
          .threads = 1};
}

}  // namespace tessera::testing
