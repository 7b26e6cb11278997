// The stage of a gather whose shards lie on the host: what the device packs comes through HostLink
// first, a stretch of values in one copy.
//
//   offload    wait updated │ cast ┐
//   transfer                       └ copy_to_device ┐
//   gather                                          └ pack_shard │ all_gather
#pragma once

#include <vector>

#include "runtime/shard/gather_stage.hpp"
#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class HostShards final : public GatherStage {
 public:
  // `shards` outlives this and has memory.
  explicit HostShards(const UnitShards& shards) : GatherStage(Place::host), shards_(shards) {}
  // Of one group of the unit's.
  void add(FlatGroup& group);
  void pack(const Slot& slot) override;

 private:
  const UnitShards& shards_;
  std::vector<ShardCopy> copies_;
};

// What a unit copies of a group, in one dtype, by one copy.
struct HostRun {
  UnitShards::ValueRange range;
  DType dtype;  // on the device
};
// All of them: without what has a gather transform.
std::vector<HostRun> values_from_host(const UnitShards& shards, const FlatGroup& of);

}  // namespace tessera::shard
