// The stage of a reduction that packs the small chunks of a piece before they travel: see
// PackedChunks.
#pragma once

#include "runtime/shard/packed_chunks.hpp"
#include "runtime/shard/reduce_stage.hpp"

namespace tessera::shard {

class PackedGradients final : public ReduceStage {
 public:
  // Of a piece that has some.
  PackedGradients(const UnitShards& shards, const PieceLayout& piece);
  void pack(const Slot& slot) override { chunks_.copy(reduce_, slot); }

 private:
  const Stream reduce_;
  PackedChunks chunks_;
};

}  // namespace tessera::shard
