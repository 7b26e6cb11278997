#include "tessera/detail/memory/host_staging.hpp"

#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"

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

}  // namespace tessera
