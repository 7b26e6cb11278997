// How a device comes to be: what the machine has to offer is checked here, once, with the remedy in
// the message.
#include <memory>
#include <string>

#include "runtime/device/cpu_check.hpp"
#include "runtime/device/open_driver.hpp"
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
                                                ExecutorOptions{.kind = options.executor,
                                                                .rank = options.rank,
                                                                .threads = options.threads,
                                                                .scheduler = options.scheduler,
                                                                .seed = options.schedule_seed,
                                                                .cost = options.cost,
                                                                .run_bodies = options.run_bodies,
                                                                .maker = options.make_executor}));
}

Device Device::cuda(const CudaOptions& options) {
  const bool plans = options.executor == ExecutorKind::virtual_;
  TESSERA_EXPECT(plans || options.executor == ExecutorKind::cuda, "Device::cuda: the executor '",
                 name(options.executor),
                 "' runs on the CPU; leave it on 'cuda', or give 'virtual' "
                 "for a plan");
  TESSERA_EXPECT(options.index >= 0, "Device::cuda: index ", options.index,
                 "; devices count from 0");
  return Device(std::make_shared<DeviceContext>(
      DeviceKind::cuda, options.rank,
      ExecutorOptions{.kind = options.executor,
                      .rank = options.rank,
                      .cost = options.cost,
                      .driver = plans ? nullptr : &open_driver(options.module, options.index),
                      .device_index = options.index},
      options.memory, options.tf32));
}

}  // namespace tessera
