// Device::cuda: of what a driver module holds the device layer knows all but the kernels, so that
// the list they must be from is given to it here.
#include "kernels/kernel_table.hpp"
#include "runtime/device/open_driver.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {

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
      ExecutorOptions{
          .executor = options.executor,
          .rank = options.rank,
          .threads = options.threads,
          .cost = options.cost,
          .driver = plans ? nullptr
                          : &open_driver(options.module, kernels::kKernelsLayout, options.index),
          .device_index = options.index},
      options.memory, options.tf32, options.deterministic));
}

}  // namespace tessera
