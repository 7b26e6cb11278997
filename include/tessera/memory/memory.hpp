// All memory of one rank's device: its pool, its host staging, and the ledger over both. It is made
// at first use.
#pragma once

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/detail/memory/host_staging.hpp"
#include "tessera/memory/pool.hpp"

namespace tessera {

class Memory;
class StepMemory;

// Owns one block of a pool. Its end gives the block back, in the order of the host program.
// Movable.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Pool& pool, Block* block) : pool_(&pool), block_(block) {}
  Buffer(Buffer&& other) noexcept
      : pool_(other.pool_), block_(std::exchange(other.block_, nullptr)) {}
  Buffer& operator=(Buffer other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(block_, other.block_);
    return *this;
  }
  ~Buffer() {
    if (block_) pool_->free(block_);
  }

  explicit operator bool() const noexcept { return block_ != nullptr; }
  std::byte* data() const noexcept { return block_->data; }
  std::int64_t bytes() const noexcept { return block_->bytes; }
  LastUse& use() const noexcept { return block_->use; }

 private:
  Pool* pool_ = nullptr;
  Block* block_ = nullptr;
};

// Memory that library kernels on the compute stream of a GPU may use at all times. It is booked as
// "workspace".
inline constexpr std::int64_t kWorkspaceBytes = 32ll << 20;

class Memory {
 public:
  // The memory of a device, or of its host's side. Throws: ContractError for meta.
  static Memory& of(const Device& device);
  static Memory& of(DeviceContext& context);

  explicit Memory(DeviceContext& context, MemorySide side = MemorySide::device);

  // The memory of Device::host, made at first use.
  Memory& host();
  bool has_host() const noexcept { return host_ != nullptr; }

  // Takes a buffer for `stream`, booked under the current owner.
  // Requires: bytes > 0.  Throws: OutOfMemory.
  Buffer allocate(std::int64_t bytes, StreamId stream);

  Ledger& ledger() noexcept { return ledger_; }
  Pool& pool() noexcept { return pool_; }
  HostStaging& staging() noexcept { return staging_; }

  // From now on freed memory, fresh memory and slots are filled with NaN before their next use, by
  // operations on the streams that they belong to. So a read that comes too late or too early
  // shows. It is for tests. It adds launches, but never an order.
  void poison_freed() noexcept {
    pool_.poison_freed();
    if (host_) host_->poison_freed();
  }
  bool poisons() const noexcept { return pool_.poisons(); }

  // Bytes taken from the system: of pools and, once made, of symmetric memory.
  std::int64_t reserved_bytes() const noexcept;
  void add_arena_bytes(std::int64_t bytes) noexcept { arena_bytes_ += bytes; }

 private:
  friend class OwnerGuard;
  friend class StepMemory;
  DeviceContext& context_;
  Ledger ledger_;
  Pool pool_;
  // The pools of StepMemory. They stay, for what outlives the step.
  std::vector<std::unique_ptr<Pool>> step_pools_, idle_pools_;
  Pool* pool_in_use_ = &pool_;
  StepMemory* step_in_use_ = nullptr;
  HostStaging staging_;
  std::unique_ptr<Memory> host_;
  Buffer workspace_;  // empty on the CPU
  OwnerId current_owner_ = 0;
  std::int64_t arena_bytes_ = 0;
};

// Books allocations in its scope under `owner`.
class OwnerGuard {
 public:
  OwnerGuard(const Device& device, std::string_view owner);
  ~OwnerGuard() {
    if (memory_) memory_->current_owner_ = before_;
  }
  OwnerGuard(const OwnerGuard&) = delete;
  OwnerGuard& operator=(const OwnerGuard&) = delete;

 private:
  Memory* memory_ = nullptr;  // null on `meta`
  OwnerId before_ = 0;
};

}  // namespace tessera
