#include "runtime/memory/limits.hpp"

#include <algorithm>

#include "runtime/base/machine.hpp"
#include "tessera/base/error.hpp"
#include "tessera/memory/pool.hpp"

namespace tessera {

std::string describe_limits(std::int64_t limit) {
  const std::int64_t addresses = address_limit_bytes();
  std::string text;
  if (limit != 0)
    text =
        concat(limit == physical_memory_bytes() ? ", the machine has " : ", the limit is ", limit);
  if (addresses != 0)
    text += concat("; the process may have ", addresses, " bytes of addresses (ulimit -v)");
  return text;
}

std::int64_t range_bytes(std::int64_t bytes) {
  static const std::int64_t range = [] {
    constexpr std::int64_t kSegments = 256;  // of all ranks of a process: a handful each
    std::int64_t most = kRangeBytes;
    if (const std::int64_t memory = physical_memory_bytes()) most = std::min(most, memory);
    if (const std::int64_t addresses = address_limit_bytes())
      most = std::min(most, addresses / kSegments);
    return most & -kSegmentBytes;
  }();
  return std::max(bytes, range);
}

}  // namespace tessera
