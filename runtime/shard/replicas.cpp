#include "runtime/shard/replicas.hpp"

#include <algorithm>

#include "runtime/shard/unit.hpp"
#include "tessera/base/checked.hpp"
#include "tessera/comm/group.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {

Replicas::Replicas(const RankGroup& group, std::int64_t bytes)
    : group_(group),
      bytes_(round_up(bytes, kAlignmentBytes)),
      memory_(group.allocate_symmetric(2 * bytes_)),
      arena_(group.device().context(), memory_->data(), 2 * bytes_),
      owner_(Memory::of(group.device().context()).ledger().owner("replica sums")),
      prepared_(group.device(), group.reduce().stream()) {}

Replicas::~Replicas() { group_.device().context().keep(std::move(memory_)); }

Slot Replicas::take(std::int64_t bytes) {
  turn_ = 1 - turn_;
  const Slot part = arena_.take(turn_ * bytes_, bytes, owner_);
  arena_.begin_use(part, StreamId::reduce);
  return part;
}

void Replicas::all_reduce(const char* name, const Progress& progress, std::span<const Sum> sums) {
  CollectiveGroup& group = prepared_.next(name);
  group.progress = progress;
  std::vector<Collective>& items = group.edit();
  items.clear();  // of another piece
  std::vector<Access> accesses;
  for (const auto& [terms, out] : sums) {
    items.push_back({.send = terms.data(),
                     .recv = out.data(),
                     .count = terms.numel(),
                     .kind = CollectiveKind::all_reduce,
                     .dtype = terms.dtype()});
    accesses.push_back(terms.access(AccessMode::read));
    accesses.push_back(out.access(AccessMode::write));
  }
  if (group_.reduce().stream() != StreamId::reduce)
    stream().wait(group_.device().reduce().record());
  group_.reduce().submit(group, accesses);
}

// --- what units need of it ---

// The reduce-scatter's sums over the ranks of this replica, summed over the replicas.
void GradientPiece::sum_replicas(const Parts& to) {
  Replicas& replicas = *shards_.replicas;
  const Slot slot = replicas.take(shard_bytes());
  {
    const Tensor terms =
        Tensor::wrap(Storage::borrowed(shards_.device, slot.data, slot.bytes, *slot.use),
                     {shard_numel()}, shards_.reduce_dtype());
    const Parts parts = parts_of(terms);
    scatter(parts);
    if (terms_.defined()) accumulate(shards_.device.reduce(), terms, terms_, false);
    terms_ = {};
    const Replicas::Sum sums[] = {{values_of(parts), values_of(to)},
                                  {counts_of(parts), counts_of(to)}};
    replicas.all_reduce(all_reduce_name(), shards_.at_reduction(), sums);
  }
  replicas.give_back(slot);
}

std::int64_t Unit::most_shard_bytes() const noexcept {
  std::int64_t most = 0;
  if (buffer_)
    for (const GradientPiece& piece : buffer_->pieces()) most = std::max(most, piece.shard_bytes());
  return most;
}

void Context::make_replicas() {
  const RankGroup* const group = mesh().replicate_group();
  std::int64_t bytes = 0;
  for (const auto& unit : units_) bytes = std::max(bytes, unit.lock()->most_shard_bytes());
  if (group && bytes > 0) replicas_ = std::make_unique<Replicas>(*group, bytes);
}

}  // namespace tessera::shard
