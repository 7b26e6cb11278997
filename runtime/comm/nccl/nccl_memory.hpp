// Symmetric memory that NCCL has allocated, a window of the communicators that gather and reduce:
// what lies there NCCL moves without a copy of its own.
#pragma once

#include <cstdint>
#include <list>

#include "runtime/comm/nccl/nccl_world.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera::comm {

class NcclMemory final : public SymmetricMemory {
 public:
  // `number` tells it from other memory of the group, the same on all ranks.  Throws: OutOfMemory.
  NcclMemory(NcclWorld& world, DeviceContext& context, std::int64_t bytes, std::int64_t number);
  ~NcclMemory() override;
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  std::int64_t number() const noexcept { return number_; }
  // Collective over `comm`, whose ranks register in one order.
  void make_window(NcclWorld::Comm& comm);
  void end_window(const NcclWorld::Comm& comm) noexcept;  // if there is one; in one order, too
  void forget_windows() noexcept { windows_.clear(); }    // their communicators are gone
  void leave() noexcept;  // the world ends, before its communicators

 private:
  struct Window {
    NcclWorld::Comm* comm;
    void* window = nullptr;  // null where NCCL takes the memory but has no use for a window
  };

  NcclWorld* world_;  // null once it has ended
  const kernels::NcclDriver& nccl_;
  DeviceContext& context_;
  const std::int64_t number_;
  std::list<Window> windows_;
};

}  // namespace tessera::comm
