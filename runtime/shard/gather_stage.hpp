// A stage of a unit's gather: what one option adds to it. A unit has the stages that its options
// ask for, and none otherwise; the gather itself knows no option.
//
//   gather stream   │ pack this rank's shards, pack .. │ all-gather │ unpack .. │
//                     or fill, in the place of it all
//
// To add one: derive from this in a file of the class's name, say where it stands among the others
// (Place), and put it by put_stage where windows are made, GatheredParameters::materialize. What it
// brings to the wire is a GatheredPart; what it needs of the slot UnitLayout adds to a parameter's
// bytes.
#pragma once

#include <cstdint>

#include "tessera/memory/arena.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::shard {

// What one item of a unit's gather fills: of every rank `count` elements, or those of rank `root`.
struct GatheredPart {
  std::int64_t offset_bytes = 0, count = 0;
  DType dtype = f32;
  int root = -1;
};

class GatherStage {
 public:
  // In this order the stages of a unit run.
  enum class Place : std::uint8_t { neighbours, host, packed, encoded };

  explicit GatherStage(Place place) : place_(place) {}
  virtual ~GatherStage() = default;
  GatherStage(const GatherStage&) = delete;
  GatherStage& operator=(const GatherStage&) = delete;
  Place place() const noexcept { return place_; }

  // Each queues its work on the gather stream, and runs before the windows are set. `version`: of
  // the parameters.
  // Whether it has filled the slot; nothing else is done then.
  virtual bool fill(const Slot&, std::uint64_t /*version*/) { return false; }
  // Brings what this rank has into the slot.
  virtual void pack(const Slot&) {}
  // Makes of what has travelled what windows show.
  virtual void unpack(const Slot&) {}
  // The unit closes, and backward will read it; what was kept for that is not needed.
  virtual void keep(const Slot&, std::uint64_t /*version*/) {}
  virtual void drop() noexcept {}

 private:
  const Place place_;
};

}  // namespace tessera::shard
