#include "runtime/comm/plain_memory.hpp"

#include <sys/mman.h>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera::comm {
namespace {

class MappedMemory final : public SymmetricMemory {
 public:
  explicit MappedMemory(std::int64_t bytes) {
    void* data = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
      throw OutOfMemory(concat("allocate_symmetric: the system has no ", bytes,
                               " bytes; use more ranks or a smaller model"));
    data_ = static_cast<std::byte*>(data);
    bytes_ = bytes;
  }
  ~MappedMemory() override { munmap(data_, static_cast<std::size_t>(bytes_)); }
};

class DeviceMemory final : public SymmetricMemory {
 public:
  DeviceMemory(const DeviceContext& context, std::int64_t bytes)
      : memory_(plain_memory(context, bytes)) {
    data_ = memory_.get();
    bytes_ = bytes;
  }

 private:
  std::shared_ptr<std::byte> memory_;
};

class CountedMemory final : public SymmetricMemory {
 public:
  CountedMemory(std::uintptr_t address, std::int64_t bytes) {
    data_ = reinterpret_cast<std::byte*>(address);
    bytes_ = bytes;
  }
};

}  // namespace

std::shared_ptr<SymmetricMemory> PlainArena::allocate(DeviceContext& context, std::int64_t bytes) {
  const std::int64_t rounded = round_up(bytes, kPageBytes);
  Memory::of(context).pool().count_outside(rounded, "symmetric memory");
  if (context.driver()) return std::make_shared<DeviceMemory>(context, rounded);
  if (context.executor().runs_bodies()) return std::make_shared<MappedMemory>(rounded);
  const std::uintptr_t address = next_;
  next_ += static_cast<std::uintptr_t>(rounded);
  return std::make_shared<CountedMemory>(address, rounded);
}

}  // namespace tessera::comm
