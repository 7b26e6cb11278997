// What Reshard::to(k) keeps of a unit from forward to backward: the full parameters in k parts, one
// a rank. Chunks of a parameter are adjacent, so that a part is some of them, and what k neighbours
// have is the whole. Of 8 ranks, k = 4:
//
//   slot, parameter p   │ chunk 0 1 │ 2 3 │ 4 5 │ 6 7 │     ranks 2 and 6 keep chunks 4 and 5;
//   part                │    0      │  1  │  2  │  3  │     ranks 0 to 3 gather, and ranks 4 to 7
//
// All of it runs on the gather stream, between the gathers.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/shard/gather_stage.hpp"
#include "runtime/shard/prepared_groups.hpp"
#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class PostForwardShards final : public GatherStage {
 public:
  // Collective over `group`, the neighbours: allocates what they read of each other. Both outlive
  // this.
  PostForwardShards(const UnitShards& shards, const RankGroup& group);
  // Queued gathers may still read its memory, so the device keeps it.
  ~PostForwardShards() override;

  // Copies this rank's part of the full parameters, which are of `version`, out of their slot.
  void keep(const Slot& slot, std::uint64_t version) override;
  // In backward, with a part of this version: queues the all-gather, and lets go of the part.
  bool fill(const Slot& slot, std::uint64_t version) override;
  void drop() noexcept override;

  int ranks() const noexcept { return group_.size(); }
  std::int64_t bytes() const noexcept { return bytes_; }

 private:
  bool has(std::uint64_t version) const noexcept { return part_.arena && version_ == version; }
  // Elements of a part of parameter i.
  std::int64_t part_numel(std::size_t i) const {
    return shards_.parameters()[i]->spec.padded_numel() / group_.size();
  }

  const UnitShards& shards_;
  const RankGroup& group_;
  PreparedGroups prepared_;
  std::int64_t bytes_ = 0;
  DType word_ = f32;  // the smallest dtype of a full parameter: all are copied as words of its size
  std::vector<std::int64_t> offset_bytes_;  // per parameter, in the part
  Tensor table_;                            // of kernels::PackEntry: from the slot to the part
  std::shared_ptr<SymmetricMemory> memory_;
  std::unique_ptr<Arena> arena_;  // of one slot, the part
  Slot part_;
  std::uint64_t version_ = 0;
};

}  // namespace tessera::shard
