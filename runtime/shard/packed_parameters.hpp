// The stage of a gather that brings small chunks to their parameters: see PackedChunks.
#pragma once

#include "runtime/shard/gather_stage.hpp"
#include "runtime/shard/packed_chunks.hpp"

namespace tessera::shard {

class PackedParameters final : public GatherStage {
 public:
  // Of a unit that has some. Adds what travels to `parts`.
  PackedParameters(const UnitShards& shards, std::vector<GatheredPart>& parts);
  void unpack(const Slot& slot) override { chunks_.copy(gather_, slot); }

 private:
  const Stream gather_;
  PackedChunks chunks_;
};

}  // namespace tessera::shard
