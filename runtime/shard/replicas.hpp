// The sums over the replicas of a hybrid mesh. What the reduce-scatter of a piece leaves on this
// rank, ranks of other replicas have of the same rows: an all-reduce over these makes the gradient.
// Two parts of memory take turns, so that the next piece is scattered while one is summed.
//
//   reduce      scatter a ┐ scatter b ┐ wait until a is summed ┐ scatter c
//   replicate             └ all_reduce a                       ┘ all_reduce b
//
// PyTorch FSDP2: all_reduce_stream and AllReduceState.
#pragma once

#include "runtime/shard/prepared_groups.hpp"
#include "runtime/shard/unit_shards.hpp"
#include "tessera/memory/arena.hpp"

namespace tessera::shard {

class Replicas {
 public:
  // Collective over `group`, the ranks that have the same rows. `bytes`: of the most that a piece
  // leaves.
  Replicas(const RankGroup& group, std::int64_t bytes);
  // Queued collectives may still use its memory, so the device keeps it.
  ~Replicas();
  Replicas(const Replicas&) = delete;
  Replicas& operator=(const Replicas&) = delete;

  // Where the sums run.
  Stream stream() const noexcept { return group_.device().stream(group_.reduce().stream()); }
  // A part, which the reduce stream may write now.
  Slot take(std::int64_t bytes);
  // Adds what the ranks have: terms that lie in a part, after all that was queued on the reduce
  // stream, into tensors of the same sizes. `name` has static lifetime.
  struct Sum {
    const Tensor &terms, &out;
  };
  void all_reduce(const char* name, const UnitShards& of, std::span<const Sum> sums);
  void give_back(const Slot& part) { arena_.give_back(part); }

  // After a failure, when every part was given back and nothing runs.
  void restart() { arena_.restart(); }

 private:
  const RankGroup& group_;
  std::int64_t bytes_;
  std::shared_ptr<SymmetricMemory> memory_;
  Arena arena_;
  OwnerId owner_;
  int half_ = 0;
  PreparedGroups prepared_;
};

}  // namespace tessera::shard
