// What the units under one root share: slots, the order of calls, and the end of a backward pass.
//
// Note [One order on every rank]
// All ranks call the same units in the same order in forward, and each call leaves its region in
// `order_`. Backward visits regions from the back. When a rank's graph does not reach one (an
// unused branch), that rank still issues what its peers issue: before a region begins, every later
// one that has not begun is skipped, which gathers and reduces it with zeros.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/world.hpp"
#include "tessera/memory/slots.hpp"
#include "tessera/shard/fully_shard.hpp"

namespace tessera::shard {

class Unit;
class UnitRegion;

class Context {
 public:
  // Makes the units below `root`, which is one, share a context. Collective: allocates the
  // symmetric arena.
  static void build(nn::Module& root);

  const World& world() const noexcept { return *world_; }
  const Device& device() const noexcept { return world_->device(); }

  // --- the order of calls ---
  void called(const std::shared_ptr<UnitRegion>& region);
  void begins(UnitRegion& region);
  // Asks for end_of_backward at the end of the running pass.
  void schedule_end();
  // After each reduction: later readers of gradients wait for `event`.
  void reduced(const Event& event) { reduced_ = event; }

  ShardPlan plan() const;
  ShardCounters counters;

 private:
  Context() = default;
  void allocate(int nesting);
  void skip(UnitRegion& region);
  void end_of_backward();

  const World* world_ = nullptr;
  std::vector<std::weak_ptr<Unit>> units_;  // in order of the module tree
  std::shared_ptr<SymmetricMemory> arena_;
  std::vector<std::unique_ptr<SlotRing>> rings_;
  int gather_slots_ = 0, reduce_slots_ = 0;
  std::int64_t gather_slot_bytes_ = 0, reduce_slot_bytes_ = 0, resident_bytes_ = 0,
               arena_bytes_ = 0;
  std::vector<std::weak_ptr<UnitRegion>> order_;
  bool end_scheduled_ = false;
  Event reduced_;
};

}  // namespace tessera::shard
