// Symmetric memory where it needs no sharing: ranks of one process, a rank without peers, and ranks
// that exchange messages.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/comm/communicator.hpp"

namespace tessera::comm {

inline constexpr std::int64_t kPageBytes = 4096;

// Whole pages from the system, at no address that the pool has. On a device that runs no bodies the
// addresses are counted and never touched. One per rank. Throws: OutOfMemory.
class PlainArena {
 public:
  std::shared_ptr<SymmetricMemory> allocate(DeviceContext& context, std::int64_t bytes);

 private:
  std::uintptr_t next_ = std::uintptr_t{1} << 50;  // beyond user space, and beyond the pool's
};

}  // namespace tessera::comm
