#include "runtime/shard/post_forward_shards.hpp"

#include "runtime/tensor/launch.hpp"
#include "tessera/autograd/node.hpp"
#include "tessera/comm/group.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {

PostForwardShards::PostForwardShards(const UnitShards& shards, const RankGroup& group)
    : GatherStage(Place::neighbours),
      shards_(shards),
      group_(group),
      prepared_(shards.device(), StreamId::gather) {
  for (const auto& p : shards.parameters())
    if (size_bytes(p->compute_dtype) < size_bytes(word_)) word_ = p->compute_dtype;
  const auto word = static_cast<std::int64_t>(size_bytes(word_));
  std::vector<std::int64_t> rows;
  for (std::size_t i = 0; i < shards.parameters().size(); ++i) {
    offset_bytes_.push_back(bytes_);
    const std::int64_t bytes =
        part_numel(i) *
        static_cast<std::int64_t>(size_bytes(shards.parameters()[i]->compute_dtype));
    if (bytes == 0) continue;
    const std::int64_t first = shards.layout().gather_offset_bytes[i] + group.rank() * bytes;
    rows.insert(rows.end(), {first / word, bytes_, bytes / word});
    bytes_ += round_up(bytes, kAlignmentBytes);
  }
  if (bytes_ == 0) return;
  table_ = kernel_table(rows, shards.device());
  shards.device().gather().wait(shards.device().compute().record());
  memory_ = group.allocate_symmetric(bytes_, "Reshard::to");
  arena_ = std::make_unique<Arena>(shards.device().context(), memory_->data(), bytes_);
}

PostForwardShards::~PostForwardShards() {
  drop();
  if (memory_) shards_.device().context().keep(std::move(memory_));
}

void PostForwardShards::keep(const Slot& slot, std::uint64_t version) {
  if (bytes_ == 0 || has(version)) return;
  drop();
  Ledger& ledger = Memory::of(shards_.device().context()).ledger();
  part_ = arena_->take(0, bytes_, ledger.owner("shards after forward"));
  version_ = version;
  arena_->begin_use(part_, StreamId::gather);
  const auto word = static_cast<std::int64_t>(size_bytes(word_));
  const Tensor full =
      Tensor::wrap(Storage::borrowed(shards_.device(), slot.data, slot.bytes, *slot.use),
                   {slot.bytes / word}, word_);
  shard::pack("keep_shard", shards_.device().gather(), table_, slot.bytes / word / group_.size(),
              full, part_, word_);
}

bool PostForwardShards::fill(const Slot& slot, std::uint64_t version) {
  if (!has(version) || !autograd::in_backward()) return false;
  CollectiveGroup& group = prepared_.next(shards_.gather_name());
  shards_.tell_progress_of_gather(group);
  if (group.items().empty())
    for (std::size_t i = 0; i < shards_.parameters().size(); ++i)
      group.edit().push_back({.send = part_.data + offset_bytes_[i],
                              .recv = slot.data + shards_.layout().gather_offset_bytes[i],
                              .count = part_numel(i),
                              .kind = CollectiveKind::all_gather,
                              .dtype = shards_.parameters()[i]->compute_dtype});
  group.place(part_.data + offset_bytes_.front(),
              slot.data + shards_.layout().gather_offset_bytes.front());
  const Access accesses[] = {part_.access(AccessMode::read), slot.access(AccessMode::write)};
  group_.gather().submit(group, accesses);
  drop();
  return true;
}

void PostForwardShards::drop() noexcept {
  if (!part_.arena) return;
  try {
    arena_->give_back(std::exchange(part_, {}));
  } catch (const std::exception& error) {
    shards_.log_kept_slot(error);
  }
}

}  // namespace tessera::shard
