#include "runtime/comm/gpu_placement.hpp"

#include "kernels/kernel_table.hpp"
#include "runtime/device/open_driver.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/device/driver.hpp"

namespace tessera::comm {
namespace {

void expect_success(DriverError error) {
  if (error) throw DeviceError(concat("run_local: ", error, "; or name one GPU (--device=cuda:0)"));
}

}  // namespace

GpuPlacement place_ranks(int ranks, const WorldOptions& options) {
  const DeviceChoice& choice = options.device;
  if (choice.kind != DeviceKind::cuda || choice.index || ranks == 1 ||
      options.executor == ExecutorKind::virtual_)
    return {};
  const Driver& driver = open_driver(choice.module, kernels::kKernelsLayout, 0);
  std::int32_t devices = 0;
  expect_success(driver.count(&devices));
  if (devices < ranks) {
    log(LogLevel::info, concat("cuda: ", ranks, " ranks share GPU 0, because there ",
                               devices == 1 ? "is 1 GPU" : concat("are ", devices, " GPUs")));
    return {};
  }
  GpuPlacement placement;
  for (int rank = 0; rank < ranks; ++rank) placement.gpus.push_back(rank);
  std::vector<std::uint8_t> far;
  std::string pairs;
  for (int reader = 0; reader < ranks; ++reader)
    for (int peer = 0; peer < ranks; ++peer) {
      bool reaches = true;
      if (reader != peer) expect_success(driver.reach(reader, peer, &reaches));
      far.push_back(!reaches);
      if (!reaches && pairs.empty()) pairs = concat("GPU ", reader, " can't read GPU ", peer);
    }
  log(LogLevel::info,
      concat("cuda: rank r of ", ranks, " is on GPU r; ",
             pairs.empty() ? "each reads its peers' memory"
                           : concat(pairs, "; where a GPU can't read another, sums use copies")));
  if (!pairs.empty()) placement.far = std::move(far);
  return placement;
}

}  // namespace tessera::comm
