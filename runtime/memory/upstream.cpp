// Where pools get their memory: the system's, set aside in ranges of addresses that a segment grows
// into, and memory that is only counted, for plans.
#include <sys/mman.h>

#include "runtime/memory/upstream_of.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace {

class SystemMemory final : public Upstream {
 public:
  std::byte* allocate(std::int64_t bytes) noexcept override {
    const auto range = static_cast<std::size_t>(range_bytes(bytes));
    void* const data = map(nullptr, range, 0);
    if (data == MAP_FAILED) return nullptr;
    if (mprotect(data, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE) == 0)
      return static_cast<std::byte*>(data);
    munmap(data, range);
    return nullptr;
  }
  void release(std::byte* data, std::int64_t bytes) noexcept override {
    munmap(data, static_cast<std::size_t>(range_bytes(bytes)));
  }
  bool resize(std::byte* data, std::int64_t bytes, std::int64_t new_bytes) noexcept override {
    if (range_bytes(bytes) != range_bytes(new_bytes)) return false;
    if (new_bytes >= bytes)
      return mprotect(data + bytes, static_cast<std::size_t>(new_bytes - bytes),
                      PROT_READ | PROT_WRITE) == 0;
    // Mapped anew: the pages go back, the addresses stay.
    return map(data + new_bytes, static_cast<std::size_t>(bytes - new_bytes), MAP_FIXED) !=
           MAP_FAILED;
  }

 private:
  // Addresses only.
  static void* map(std::byte* at, std::size_t bytes, int flags) noexcept {
    return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  }
};

class CountedMemory final : public Upstream {
 public:
  CountedMemory(CudaMemory like, MemorySide side)
      : grows_(like == CudaMemory::mapped),
        next_(std::uintptr_t{1} << (side == MemorySide::host ? 48 : 47)) {}

  std::byte* allocate(std::int64_t bytes) noexcept override {
    const std::uintptr_t data = next_;
    next_ += static_cast<std::uintptr_t>(range_bytes(bytes));
    return reinterpret_cast<std::byte*>(data);
  }
  void release(std::byte*, std::int64_t) noexcept override {}
  bool resize(std::byte*, std::int64_t bytes, std::int64_t new_bytes) noexcept override {
    return grows_ && range_bytes(bytes) == range_bytes(new_bytes);
  }

 private:
  const bool grows_;
  std::uintptr_t next_;  // outside what user space can map
};

}  // namespace

std::unique_ptr<Upstream> system_memory() { return std::make_unique<SystemMemory>(); }
std::unique_ptr<Upstream> counted_memory(CudaMemory like, MemorySide side) {
  return std::make_unique<CountedMemory>(like, side);
}

// Pinned memory comes in pieces that cannot grow.
std::unique_ptr<Upstream> upstream_of(DeviceContext& context, MemorySide side) {
  const bool counted = !context.executor().runs_bodies();
  if (side == MemorySide::host) {
    const bool is_pinned = context.kind() == DeviceKind::cuda;
    if (counted) return counted_memory(is_pinned ? CudaMemory::pieces : CudaMemory::mapped, side);
    return is_pinned ? pinned_memory(context) : system_memory();
  }
  if (context.kind() != DeviceKind::cuda) return counted ? counted_memory() : system_memory();
  return counted ? counted_memory(context.cuda_memory())
                 : device_memory(context, context.cuda_memory());
}

}  // namespace tessera
