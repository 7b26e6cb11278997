// The stage of a reduction that gives the program the sums of all ranks, where they lie: see
// set_all_reduce_hook.
#pragma once

#include "runtime/shard/reduce_stage.hpp"
#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class GradientPiece;

class HookedSums final : public ReduceStage {
 public:
  // Both outlive this; `piece` has it.
  HookedSums(const GradientPiece& piece, const UnitShards& shards)
      : ReduceStage(Place::hook), piece_(piece), shards_(shards) {}
  void pass(Reduction& r) override;

 private:
  const GradientPiece& piece_;
  const UnitShards& shards_;
};

}  // namespace tessera::shard
