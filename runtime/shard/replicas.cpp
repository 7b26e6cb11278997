#include "runtime/shard/replicas.hpp"

#include "tessera/comm/group.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {

Replicas::Replicas(const RankGroup& group, std::int64_t bytes)
    : group_(group),
      bytes_(round_up(bytes, kAlignmentBytes)),
      memory_(group.allocate_symmetric(2 * bytes_, "the sums of replicas")),
      arena_(group.device().context(), memory_->data(), 2 * bytes_),
      owner_(Memory::of(group.device().context()).ledger().owner("replica sums")),
      prepared_(group.device(), group.reduce().stream()) {}

Replicas::~Replicas() { group_.device().context().keep(std::move(memory_)); }

Slot Replicas::take(std::int64_t bytes) {
  half_ = 1 - half_;
  const Slot part = arena_.take(half_ * bytes_, bytes, owner_);
  arena_.begin_use(part, StreamId::reduce);
  return part;
}

void Replicas::all_reduce(const char* name, const UnitShards& of, std::span<const Sum> sums) {
  CollectiveGroup& group = prepared_.next(name);
  of.tell_progress_of_reduction(group);
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

}  // namespace tessera::shard
