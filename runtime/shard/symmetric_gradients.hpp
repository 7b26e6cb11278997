// The flat gradients of a model where symmetric memory is a window of who reduces: one block of
// it, in which each has its place. So NCCL moves sums from the gradient buffer into the gradient
// without a copy of its own.
//
//   │ unit 0 │ unit 1 │ .. │     each at one offset on all ranks, from the root's first call on
//
// Ragged shards differ in size between ranks, so gradients of units that have one come from the
// pool. So do those that another kernel writes: of 16-bit sums, and of shards on the host.
#pragma once

#include <map>
#include <memory>
#include <span>

#include "runtime/shard/reduce_stage.hpp"
#include "runtime/shard/unit_shards.hpp"
#include "tessera/memory/arena.hpp"

namespace tessera::shard {

class SymmetricGradients {
 public:
  // `group`: whose sums the gradients are, and which has windows. Null where no unit has such a
  // gradient. Collective over it.
  static std::unique_ptr<SymmetricGradients> make(const RankGroup& group,
                                                  std::span<const UnitShards* const> units);
  bool holds(const FlatGroup& of) const { return offsets_.contains(&of); }
  std::int64_t bytes() const noexcept { return block_->memory->bytes(); }
  // For work on compute, and what comes behind it.  Throws: ContractError where the last one is
  // still held.
  Tensor take(const FlatGroup& of) const;
  // After a failure, when nothing runs.
  void restart();

 private:
  using Offsets = std::map<const FlatGroup*, std::int64_t>;  // only looked up in

  // What gradients that outlive their model keep.
  struct Block {
    Block(const RankGroup& group, std::int64_t size_bytes);
    // Queued collectives may still use its memory, so the device keeps it.
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    const Device device;
    std::shared_ptr<SymmetricMemory> memory;
    Arena arena;
  };

  SymmetricGradients(const RankGroup& group, Offsets offsets, std::int64_t size_bytes)
      : offsets_(std::move(offsets)), block_(std::make_shared<Block>(group, size_bytes)) {}

  const Offsets offsets_;
  const std::shared_ptr<Block> block_;
};

// The stage of a reduction whose gradient lies there.
class SymmetricGradient final : public ReduceStage {
 public:
  // Both outlive this.
  SymmetricGradient(const UnitShards& shards, const SymmetricGradients& gradients)
      : ReduceStage(Place::gradient), shards_(shards), gradients_(gradients) {}
  Tensor fresh_gradient() override { return gradients_.take(*shards_.group()); }

 private:
  const UnitShards& shards_;
  const SymmetricGradients& gradients_;
};

}  // namespace tessera::shard
