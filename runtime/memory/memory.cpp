#include "tessera/memory/memory.hpp"

#include "runtime/base/machine.hpp"
#include "runtime/memory/upstream_of.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {

Memory::Memory(DeviceContext& context, MemorySide side)
    : context_(context),
      pool_(context, ledger_, upstream_of(context, side)),
      staging_(context, ledger_) {
  const bool is_host = side == MemorySide::host || context.kind() == DeviceKind::cpu;
  if (is_host && context.executor().runs_bodies()) pool_.set_limit_bytes(physical_memory_bytes());
  if (is_host) return;
  const OwnerId owner = ledger_.owner("workspace");
  workspace_ = Buffer(pool_, pool_.allocate(kWorkspaceBytes, StreamId::compute, owner));
  context.executor().set_workspace(StreamId::compute, workspace_.data(),
                                   static_cast<std::size_t>(kWorkspaceBytes));
}

Memory& Memory::of(DeviceContext& context) {
  if (!context.memory) context.memory = std::make_shared<Memory>(context);
  return *static_cast<Memory*>(context.memory.get());
}

Memory& Memory::of(const Device& device) {
  TESSERA_EXPECT(!device.is_meta(), "a tensor on meta has no memory; materialize the model first");
  Memory& main = of(device.context());
  return device.is_host() ? main.host() : main;
}

Memory& Memory::host() {
  if (!host_) {
    host_ = std::make_unique<Memory>(context_, MemorySide::host);
    if (poisons()) host_->poison_freed();
  }
  return *host_;
}

Buffer Memory::allocate(std::int64_t bytes, StreamId stream) {
  return Buffer(*pool_in_use_, pool_in_use_->allocate(bytes, stream, current_owner_));
}

std::int64_t Memory::reserved_bytes() const noexcept {
  std::int64_t bytes = pool_.reserved_bytes() + arena_bytes_;
  for (const auto* pools : {&step_pools_, &idle_pools_})
    for (const auto& pool : *pools) bytes += pool->reserved_bytes();
  return bytes;
}

OwnerGuard::OwnerGuard(const Device& device, std::string_view owner) {
  if (device.is_meta()) return;
  memory_ = &Memory::of(device);
  before_ = memory_->current_owner_;
  memory_->current_owner_ = memory_->ledger_.owner(owner);
}

}  // namespace tessera
