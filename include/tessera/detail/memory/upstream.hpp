// Where pools get their memory: from the system, from a GPU's driver, or only counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tessera/device/device.hpp"

namespace tessera {

// Where a pool gets its segments. Addresses are set aside in ranges, so that a segment grows at its
// end as long as its range has room: memory in one piece, whatever the order of growth.
class Upstream {
 public:
  virtual ~Upstream() = default;
  // Null when there is no more.
  virtual std::byte* allocate(std::int64_t bytes) noexcept = 0;
  virtual void release(std::byte* data, std::int64_t bytes) noexcept = 0;
  // The segment of `bytes` at `data` becomes larger or smaller; false when it cannot.
  virtual bool resize(std::byte* data, std::int64_t bytes, std::int64_t new_bytes) noexcept = 0;
};

inline constexpr std::int64_t kRangeBytes = 16ll << 30;
// Addresses that are set aside for a segment of `bytes`, and that it may grow to: kRangeBytes, but
// no more than the machine has memory, and a small part of what the process may have (ulimit -v).
std::int64_t range_bytes(std::int64_t bytes);

// Whose memory: the device's, or what this rank has on the host beside it; see Device::host.
enum class MemorySide : std::uint8_t { device, host };

std::unique_ptr<Upstream> system_memory();
// Hands out address ranges that are counted and never touched. `pieces`: that can't grow. No
// address is both the device's and the host's.
std::unique_ptr<Upstream> counted_memory(CudaMemory like = CudaMemory::mapped,
                                         MemorySide side = MemorySide::device);
// Memory of the host that a GPU's copies reach.  Requires: the device has a driver.
std::unique_ptr<Upstream> pinned_memory(const DeviceContext& context);
// A GPU's memory.  Requires: the device has a driver.
std::unique_ptr<Upstream> device_memory(const DeviceContext& context, CudaMemory kind);

}  // namespace tessera
