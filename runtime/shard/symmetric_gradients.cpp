#include "runtime/shard/symmetric_gradients.hpp"

#include <algorithm>

#include "tessera/base/log.hpp"
#include "tessera/comm/group.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {
namespace {

std::int64_t bytes_of(const FlatGroup& group) {
  return (group.gradient_numel + group.counts_numel()) * static_cast<std::int64_t>(sizeof(float));
}

// Whether its reductions write the gradient, at one place on all ranks. A slice's is its unit's.
bool is_even(const UnitShards& unit) {
  if (unit.is_slice() || !unit.group() || unit.group()->gradient_numel == 0) return false;
  const auto is_ragged = [](const auto& p) { return p->trainable && p->spec.is_ragged(); };
  return unit.has_buffer() && !unit.is_offloaded() && unit.reduce_dtype() == f32 &&
         std::ranges::none_of(unit.parameters(), is_ragged) &&
         std::ranges::none_of(unit.streamed(), is_ragged);
}

}  // namespace

std::unique_ptr<SymmetricGradients> SymmetricGradients::make(
    const RankGroup& group, std::span<const UnitShards* const> units) {
  Offsets offsets;
  std::int64_t end = 0;
  for (const UnitShards* const unit : units)
    if (is_even(*unit) && offsets.try_emplace(unit->group().get(), end).second)
      end = round_up(checked_add(end, bytes_of(*unit->group())), kAlignmentBytes);
  if (end == 0) return nullptr;
  return std::unique_ptr<SymmetricGradients>(
      new SymmetricGradients(group, std::move(offsets), end));
}

SymmetricGradients::Block::Block(const RankGroup& group, std::int64_t size_bytes)
    : device(group.device()),
      memory(group.allocate_symmetric(size_bytes, "the gradients of a model")),
      arena(device.context(), memory->data(), memory->bytes()) {}

SymmetricGradients::Block::~Block() { device.context().keep(std::move(memory)); }

Tensor SymmetricGradients::take(const FlatGroup& of) const {
  const OwnerId owner = Memory::of(block_->device).ledger().owner("gradients");
  const Slot slot = block_->arena.take(offsets_.at(&of), bytes_of(of), owner);
  TESSERA_EXPECT(slot.arena, "backward: the gradient of unit '", of.name,
                 "' of an earlier step is still held, and with NcclOptions::windows that of each "
                 "step lies at one place; drop what Parameter::grad gave before the next backward, "
                 "or copy it");
  block_->arena.begin_use(slot, StreamId::compute);
  auto lent = Storage::borrowed(block_->device, slot.data, slot.bytes, *slot.use);
  Storage* const storage = lent.get();
  const auto give_back = [block = block_, lent = std::move(lent), slot](Storage*) {
    try {
      block->arena.give_back(slot);
    } catch (const std::exception& error) {
      log(LogLevel::error, concat("a gradient's place could not be given back: ", error.what()));
    }
  };
  return Tensor::wrap({storage, give_back}, {bytes_of(of) / 4}, f32);
}

void SymmetricGradients::restart() {
  if (block_->arena.is_free(0, block_->arena.bytes())) block_->arena.restart();
}

}  // namespace tessera::shard
