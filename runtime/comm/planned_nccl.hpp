// What a plan counts of NCCL's, for ranks that are processes with a GPU each. What a run measures
// is in nccl/.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "runtime/comm/item_mover.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/detail/base/checked.hpp"

namespace tessera::comm {

// The names in a run's ledger and in a plan's.
inline constexpr const char* kMeasuredNccl = "NCCL communicators";
inline constexpr const char* kNcclLanding = "staging and landing memory of NCCL communicators";
inline constexpr const char* kAssumedNccl = "NCCL communicators, assumed where ranks are processes";

// How many blocks of threads a communicator may have; 0: as many as NCCL takes, also where that is
// still to be measured. The calls of `control` are small.
constexpr int most_ctas(std::string_view role, const NcclOptions& options) {
  return role == "control" ? 1 : role == "reduce" ? std::max(options.reduce_max_ctas, 0) : 0;
}

// What a communicator that calls are on takes of its GPU: a ring has two connections for each block
// of threads, each with a buffer of every protocol, whatever the number of ranks. One without calls
// connects nothing.
// Source: NVIDIA/nccl#986; the buffers' sizes are NCCL's defaults (LL, LL128, Simple), of 32
// blocks.
constexpr std::int64_t assumed_nccl_bytes(int ctas) {
  constexpr std::int64_t kLL = 512 << 10, kLL128 = 120 * 640 * 8 * 8, kSimple = 4 << 20;
  constexpr int kMostCtas = 32, kConnections = 2;
  return (ctas > 0 && ctas < kMostCtas ? ctas : kMostCtas) * kConnections *
         (kLL + kLL128 + kSimple);
}

// Ours, of each communicator: what is staged, and what peers send to be folded.
inline constexpr std::int64_t kNcclLandingBytes = kStagedBytes + kLandingBytes;

// ncclMemAlloc hands out whole granules of the GPU's memory, which are as large on GPUs of today.
inline constexpr std::int64_t kNcclGranuleBytes = 2 << 20;

class PlannedNccl {
 public:
  explicit PlannedNccl(const WorldOptions& options)
      : options_(options.nccl),
        is_planned_(options.device.kind == DeviceKind::cuda &&
                    options.executor == ExecutorKind::virtual_) {}

  // Of a group of so many ranks.
  bool is_planned(int size) const { return is_planned_ && size > 1; }
  std::int64_t bytes_of(std::string_view role, int size) const {
    return is_planned(size) ? assumed_nccl_bytes(most_ctas(role, options_)) : 0;
  }
  bool has_windows(int size) const { return is_planned(size) && options_.windows; }
  // What symmetric memory takes.
  std::int64_t whole_granules(std::int64_t bytes, int size) const {
    return has_windows(size) ? round_up(bytes, kNcclGranuleBytes) : bytes;
  }

 private:
  const NcclOptions options_;
  const bool is_planned_;
};

}  // namespace tessera::comm
