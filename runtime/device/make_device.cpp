// How the CPU's device comes to be: what the processor lacks is said here, once, with the remedy.
// A GPU's is made in runtime/tensor/cuda_device.cpp, above the kernels that its module must have.
#include <memory>
#include <string>

#include "runtime/device/cpu_check.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {

Device Device::cpu(const CpuOptions& options) {
  const std::string missing = missing_cpu_feature(kernel_arch());
  if (!missing.empty())
    throw DeviceError(
        concat("Device::cpu: this processor lacks ", missing, ", and the kernels were built for ",
               kernel_arch(),
               "; rebuild with -Dkernel_arch=native on this machine, or with an empty "
               "kernel_arch for any processor"));
  return Device(std::make_shared<DeviceContext>(DeviceKind::cpu, options.rank,
                                                ExecutorOptions{.executor = options.executor,
                                                                .rank = options.rank,
                                                                .threads = options.threads,
                                                                .scheduler = options.scheduler,
                                                                .cost = options.cost,
                                                                .run_bodies = options.run_bodies}));
}

}  // namespace tessera
