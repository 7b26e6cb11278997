// The stage of a reduction whose gradients lie on the host: what the reduce-scatter leaves is
// copied there, and added there.
//
//   reduce     reduce_scatter ┐
//   transfer                  └ copy_to_host ┐
//   offload                                  └ accumulate_shard, where a gradient is there already
//                                              or the wire has another dtype
#pragma once

#include "runtime/shard/reduce_stage.hpp"
#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class GradientPiece;

class HostGradients final : public ReduceStage {
 public:
  // Both outlive this; `piece` has it.
  HostGradients(const GradientPiece& piece, const UnitShards& shards)
      : ReduceStage(Place::host), piece_(piece), shards_(shards) {}
  bool is_elsewhere() const noexcept override { return true; }
  void place(Reduction& r) override;
  void pass(Reduction& r) override;
  void drop() noexcept override { sums_ = {}; }

 private:
  const GradientPiece& piece_;
  const UnitShards& shards_;
  Tensor sums_;  // on the device, until they are copied
};

}  // namespace tessera::shard
