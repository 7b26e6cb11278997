#include "runtime/comm/nccl/nccl_memory.hpp"

#include "runtime/comm/planned_nccl.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera::comm {

NcclMemory::NcclMemory(NcclWorld& world, DeviceContext& context, std::int64_t bytes,
                       std::int64_t number)
    : world_(&world), nccl_(world.nccl()), context_(context), number_(number) {
  bytes_ = round_up(bytes, kNcclGranuleBytes);
  Memory::of(context).pool().count_outside(bytes_, "symmetric memory");
  static_cast<void>(context.acting_driver());
  void* data = nullptr;
  if (const char* const error = nccl_.allocate(bytes_, &data))
    throw OutOfMemory(concat("allocate_symmetric: NCCL has no ", bytes_, " bytes (", error,
                             "); use more ranks or a smaller model"));
  data_ = static_cast<std::byte*>(data);
}

// Freeing it does not wait for the device, as freeing other memory does.
NcclMemory::~NcclMemory() {
  try {
    context_.synchronize();
  } catch (...) {
    context_.fail_late();
  }
  leave();
  static_cast<void>(context_.acting_driver());
  if (const char* const error = nccl_.release(data_))
    log(LogLevel::error, concat("symmetric memory of ", bytes_, " bytes is not freed: ", error));
}

void NcclMemory::make_window(NcclWorld::Comm& comm) {
  Window& made = windows_.emplace_back(Window{&comm});
  world_->make_window(comm, data_, bytes_, &made.window);
}

void NcclMemory::end_window(const NcclWorld::Comm& comm) noexcept {
  std::erase_if(windows_, [&](const Window& made) {
    if (made.comm == &comm && made.window) world_->end_window(comm, made.window);
    return made.comm == &comm;
  });
}

void NcclMemory::leave() noexcept {
  for (const Window& made : windows_)
    if (made.window && world_) world_->end_window(*made.comm, made.window);
  windows_.clear();
  world_ = nullptr;
}

}  // namespace tessera::comm
