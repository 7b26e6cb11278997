// Those parameters of a unit that are gathered in another form: see GatherTransform. Of a slot, the
// part of such a parameter begins with its full tensor; the arrays that travel lie behind it.
//
//   slot   │ p0: chunk 0, 1, .. │ p1: full, decoded │ part 0 of rank 0, 1, .. │ part 1 of .. │ p2 │
//
// So one slot has all that a gather writes, and its bytes are the plan's. Rejected: a slot apart
// for what travels, given back when it is decoded, which would be one more kind of slot to plan for
// a third of the bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/shard/gather_stage.hpp"
#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class EncodedParameters final : public GatherStage {
 public:
  // Of a unit that is materialized. Adds what travels to `parts`.
  EncodedParameters(const UnitShards& shards, std::vector<GatheredPart>& parts);
  ~EncodedParameters() override { storage_->data = nullptr; }

  // On the gather stream: this rank's chunks into their parts of the slot, and, when those of the
  // other ranks are there, all of them into full tensors. What lies on the host is encoded there.
  void pack(const Slot& slot) override;
  void unpack(const Slot& slot) override;

 private:
  struct One {
    std::shared_ptr<ParameterState> parameter;
    Tensor chunk, full;
    std::vector<Tensor> own, all;  // parts
  };
  void encode_on_host(const Slot& slot);

  const UnitShards& shards_;
  std::shared_ptr<Storage> storage_;  // of the slot, while it is used
  std::vector<One> encoded_;
  Tensor table_;  // i64: bytes of the host's parts, one behind the other, to those
  std::int64_t bytes_on_host_ = 0;  // of the slot; and all of them
};

// What travels of a parameter with a transform, in a slot.
std::int64_t encoded_bytes(const ParameterState& parameter);
// Of this rank's chunks of a unit, as the host encodes them.
std::int64_t encoded_chunk_bytes(const UnitShards& shards);

}  // namespace tessera::shard
