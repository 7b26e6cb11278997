// On which GPU each rank of run_local computes, and whose memory its kernels can read.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/comm/world.hpp"

namespace tessera::comm {

struct GpuPlacement {
  std::vector<int> gpus;          // by rank; empty where all are on one device
  std::vector<std::uint8_t> far;  // [reader, peer]; empty where every kernel reads every peer

  // Whether kernels of rank `reader` can't read the memory of rank `peer`.
  bool is_far(int reader, int peer) const {
    return !far.empty() &&
           far[static_cast<std::size_t>(reader) * gpus.size() + static_cast<std::size_t>(peer)] !=
               0;
  }
  // The options of one rank.
  WorldOptions options_of(int rank, WorldOptions options) const {
    if (!gpus.empty()) options.device.index = gpus[static_cast<std::size_t>(rank)];
    return options;
  }
};

// Rank r on GPU r where `options` name no GPU and there are as many, and each pair of them is given
// access to the other's memory: before any rank allocates, for mapped memory is readable only to
// those who had access before. One line for the log says which path was taken.
// Throws: DeviceError as Device::cuda.
GpuPlacement place_ranks(int ranks, const WorldOptions& options);

}  // namespace tessera::comm
