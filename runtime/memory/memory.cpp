#include "tessera/memory/memory.hpp"

#include "runtime/base/machine.hpp"
#include "tessera/base/checked.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {

HostStaging::HostStaging(DeviceContext& context, Ledger& ledger)
    : context_(context), ledger_(ledger), owner_(ledger.owner("host staging")) {}

HostStaging::Piece& HostStaging::take(std::int64_t bytes) {
  const std::int64_t rounded = round_up(bytes, kAlignmentBytes);
  Piece* found = nullptr;
  for (const auto& piece : pieces_) {
    if (piece->taken || piece->bytes != rounded) continue;
    if (!context_.host_clock().covers(piece->use.touched)) continue;
    found = piece.get();
    break;
  }
  if (!found) {
    Memory::of(context_).pool().count_outside(rounded, "host memory");
    storage_.push_back(host_memory(context_, rounded));
    pieces_.push_back(std::make_unique<Piece>());
    found = pieces_.back().get();
    found->data = storage_.back().get();
    found->bytes = rounded;
    tell(MemoryEvent::Kind::acquired, *found);
  }
  found->taken = true;
  ledger_.add(owner_, rounded);
  tell(MemoryEvent::Kind::handed_out, *found);
  return *found;
}

void HostStaging::tell(MemoryEvent::Kind kind, const Piece& piece) const {
  if (!context_.is_observed()) return;
  context_.tell({.kind = kind,
                 .begin = piece.data,
                 .end = piece.data + piece.bytes,
                 .owner = ledger_.name(owner_),
                 .to_host = true});
}

HostStaging::~HostStaging() {
  for (const auto& piece : pieces_) tell(MemoryEvent::Kind::released, *piece);
}

void HostStaging::give_back(Piece& piece) noexcept {
  tell(MemoryEvent::Kind::given_back, piece);
  piece.taken = false;
  ledger_.remove(owner_, piece.bytes);
}

namespace {

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

}  // namespace

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
  return Buffer(pool_, pool_.allocate(bytes, stream, current_owner_));
}

OwnerGuard::OwnerGuard(const Device& device, std::string_view owner) {
  if (device.is_meta()) return;
  memory_ = &Memory::of(device);
  before_ = memory_->current_owner_;
  memory_->current_owner_ = memory_->ledger_.owner(owner);
}

}  // namespace tessera
