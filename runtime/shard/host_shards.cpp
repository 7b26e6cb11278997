#include "runtime/shard/host_shards.hpp"

#include "runtime/shard/host_link.hpp"

namespace tessera::shard {

void HostShards::add(FlatGroup& group) {
  for (const auto& [range, dtype] : values_from_host(shards_, group))
    for (ShardCopy& copy : shard_copies(shards_, group, range, range.begin))
      copies_.push_back(std::move(copy));
}

void HostShards::pack(const Slot& slot) {
  for (const auto& [group, own, dtype, table, numel] : copies_) {
    const Tensor values = shards_.host()->begin_gather(
        group->values.view({own.numel()}, {1}, own.begin), dtype, group->updated);
    shard::pack("pack_shard", shards_.device().gather(), table, numel, values, slot, dtype);
    shards_.host()->end_gather();
  }
}

std::vector<HostRun> values_from_host(const UnitShards& shards, const FlatGroup& of) {
  std::vector<HostRun> runs;
  bool is_open = false;
  for (std::size_t i = 0; i < shards.parameters().size(); ++i) {
    const ParameterState& p = *shards.parameters()[i];
    if (p.group.get() != &of) continue;
    const bool is_more = is_open && runs.back().dtype == p.compute_dtype;
    is_open = !p.transform;
    if (!is_open) continue;
    if (!is_more) runs.push_back({{shards.offset_of(i), 0}, p.compute_dtype});
    runs.back().range.end = shards.offset_of(i) + p.spec.chunk_numel();
  }
  return runs;
}

}  // namespace tessera::shard
