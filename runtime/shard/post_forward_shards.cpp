#include "runtime/shard/post_forward_shards.hpp"

#include "runtime/shard/unit.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/autograd/node.hpp"
#include "tessera/comm/group.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {

PostForwardShards::PostForwardShards(const UnitShards& shards, const RankGroup& group)
    : shards_(shards), group_(group), prepared_(shards.device, StreamId::gather) {
  for (const auto& p : shards.parameters)
    if (size_bytes(p->compute_dtype) < size_bytes(word_)) word_ = p->compute_dtype;
  const auto word = static_cast<std::int64_t>(size_bytes(word_));
  std::vector<std::int64_t> rows;
  for (std::size_t i = 0; i < shards.parameters.size(); ++i) {
    offset_bytes_.push_back(bytes_);
    const std::int64_t bytes =
        part_numel(i) * static_cast<std::int64_t>(size_bytes(shards.parameters[i]->compute_dtype));
    if (bytes == 0) continue;
    const std::int64_t first = shards.layout.gather_offset_bytes[i] + group.rank() * bytes;
    rows.insert(rows.end(), {first / word, bytes_, bytes / word});
    bytes_ += round_up(bytes, kAlignmentBytes);
  }
  if (bytes_ == 0) return;
  table_ = table_of(rows, shards.device);
  shards.device.gather().wait(shards.device.compute().record());
  memory_ = group.allocate_symmetric(bytes_);
  arena_ = std::make_unique<Arena>(shards.device.context(), memory_->data(), bytes_);
}

PostForwardShards::~PostForwardShards() {
  drop();
  if (memory_) shards_.device.context().keep(std::move(memory_));
}

void PostForwardShards::keep(const Slot& slot, std::uint64_t version) {
  if (bytes_ == 0 || has(version)) return;
  drop();
  Ledger& ledger = Memory::of(shards_.device.context()).ledger();
  part_ = arena_->take(0, bytes_, ledger.owner("shards after forward"));
  version_ = version;
  arena_->begin_use(part_, StreamId::gather);
  const auto word = static_cast<std::int64_t>(size_bytes(word_));
  const Tensor full =
      Tensor::wrap(Storage::borrowed(shards_.device, slot.data, slot.bytes, *slot.use),
                   {slot.bytes / word}, word_);
  pack("keep_shard", shards_.device.gather(), table_, slot.bytes / word / group_.size(), full,
       part_, word_);
}

void PostForwardShards::gather(const Slot& slot) {
  CollectiveGroup& group = prepared_.next(shards_.gather_name);
  group.progress = shards_.at_gather();
  if (group.items().empty())
    for (std::size_t i = 0; i < shards_.parameters.size(); ++i)
      group.edit().push_back({.send = part_.data + offset_bytes_[i],
                              .recv = slot.data + shards_.layout.gather_offset_bytes[i],
                              .count = part_numel(i),
                              .kind = CollectiveKind::all_gather,
                              .dtype = shards_.parameters[i]->compute_dtype});
  group.place(part_.data + offset_bytes_.front(),
              slot.data + shards_.layout.gather_offset_bytes.front());
  const Access accesses[] = {part_.access(AccessMode::read), slot.access(AccessMode::write)};
  group_.gather().submit(group, accesses);
  drop();
}

void PostForwardShards::drop() noexcept {
  if (!part_.arena) return;
  try {
    arena_->give_back(std::exchange(part_, {}));
  } catch (const std::exception& error) {
    shards_.log_kept_slot(error);
  }
}

void check_reshard(const char* function, const std::string& unit, Reshard reshard,
                   const DeviceMesh& mesh,
                   std::span<const std::shared_ptr<ParameterState>> parameters) {
  if (!reshard.is_partial()) return;
  const int k = reshard.ranks(), ranks = mesh.shard_size(),
            others = mesh.world().size() - mesh.size();
  TESSERA_EXPECT(k > 1 && k < ranks && ranks % k == 0, function, ": ", unit, ": Reshard::", reshard,
                 " of ", ranks, ranks == 1 ? " rank" : " ranks",
                 " that shard; give a divisor of them, above 1 and below them");
  TESSERA_EXPECT(others == 0, function, ": ", unit, ": Reshard::", reshard,
                 " makes groups of all ranks of the world, of which ", others,
                 " are not in the mesh; use Reshard::always");
  for (const auto& p : parameters)
    TESSERA_EXPECT(p->block_rows == 0, function, ": ", unit, ": Reshard::", reshard,
                   " keeps even parts, and '", p->name, "' is sharded by blocks of ", p->block_rows,
                   " rows; use Reshard::always, or leave set_block_rows out");
}

// --- what units need of it ---

void GatheredParameters::keep_over(const RankGroup* neighbours) {
  kept_ = neighbours ? std::make_unique<PostForwardShards>(shards_, *neighbours) : nullptr;
}

void GatheredParameters::keep_part() {
  if (kept_ && uses_slot() && state_ == State::open) kept_->keep(slot_, gathered_version_);
}

void GatheredParameters::drop_part() noexcept {
  if (kept_) kept_->drop();
}

const RankGroup* Context::neighbours(Reshard reshard) {
  if (!reshard.is_partial()) return nullptr;
  const int k = reshard.ranks(), first = group_->rank() / k * k;
  const RankGroup*& known = neighbours_[k];  // null where a split has failed
  if (!known)
    known = mesh().world().split(
        concat("dp_shard, ", k),
        group_->ranks().subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(k)));
  return known;
}

}  // namespace tessera::shard
