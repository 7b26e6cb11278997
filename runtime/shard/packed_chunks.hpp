// The copies between small chunks as they travel and the parameters, or gradients, that they are
// of: one kernel each, on the stream of the collective.
//
//   gather   pack_shard │ all_gather │ unpack_chunks         of a slot    packed ──▶ p0, p1, ..
//   reduce   complete   │ pack_chunks │ reduce_scatter       of a piece   p0, p1, .. ──▶ packed
//
// So a unit's norms and biases are one step of the wire, and shards, state and files know nothing
// of it. Rejected: to compute where they were packed, which needs kernels that read a vector in
// parts; two kernels a parameter.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class PackedChunks {
 public:
  enum class Way : std::uint8_t { in, out };
  // Where the chunks of an entry lie one behind the other, from rank 0 on, and how many elements
  // each has.
  struct Chunks {
    std::int64_t offset_bytes, numel;
  };
  // `of`: of each entry that is packed; there is one.
  PackedChunks(const UnitShards& shards, const PackedLayout& layout, Way way, DType dtype,
               const std::vector<Chunks>& of);

  // Queues the copies.
  void copy(Stream stream, const Slot& slot) const;

 private:
  Way way_;
  std::shared_ptr<Storage> storage_;  // the slot, while it is copied
  Tensor whole_, table_;
  std::int64_t numel_ = 0;
};

}  // namespace tessera::shard
