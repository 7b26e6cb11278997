// The stage of a reduction that sums over the replicas of a hybrid mesh what the reduce-scatter
// leaves, or keeps this rank's terms of that sum for a later pass: see Replicas, and
// set_requires_all_reduce.
#pragma once

#include "runtime/shard/reduce_stage.hpp"
#include "runtime/shard/replicas.hpp"

namespace tessera::shard {

class GradientPiece;

class ReplicaSums final : public ReduceStage {
 public:
  // All outlive this; `piece` has it.
  ReplicaSums(const GradientPiece& piece, const UnitShards& shards, Replicas& replicas)
      : ReduceStage(Place::replicas), piece_(piece), shards_(shards), replicas_(replicas) {}

  Stream stream(Stream) const override { return replicas_.stream(); }
  bool postpones() const noexcept override { return !shards_.reductions().all_reduces; }
  void place(Reduction& r) override;
  void pass(Reduction& r) override;
  void drop() noexcept override;
  void drop_entry(std::size_t entry, std::int64_t begin, std::int64_t chunk) override;

 private:
  void sum(const Sums& to);
  void keep();
  const char* all_reduce_name();

  const GradientPiece& piece_;
  const UnitShards& shards_;
  Replicas& replicas_;
  Slot part_;          // of Replicas', where the terms of the sum that is made lie,
  Tensor terms_;       // and these: values, counts
  Sums to_{};          // and the sum
  Tensor kept_;        // terms of sums that are to come,
  int backwards_ = 0;  // and whose they are
};

}  // namespace tessera::shard
