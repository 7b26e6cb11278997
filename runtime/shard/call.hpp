// One forward for training, one call in it, and the call's region in backward: what connects the
// tape with the units. Who holds whom stands in the README of this folder.
//
//   forward    root ( block 0 │ block 1 )      one Forward, a Call and a UnitRegion for each of 3
//   backward   enter root ─ enter 1 ─ leave 1 ─ enter 0 ─ leave 0 ─ leave root
//
// A region lives as long as a node of it. When the last one of a forward goes, its calls are no
// longer due.
#pragma once

#include <memory>
#include <vector>

#include "tessera/autograd/node.hpp"

namespace tessera::shard {

class Unit;

// An outermost call and the calls inside it.
struct Forward {
  std::vector<std::weak_ptr<Unit>> opened;  // since it was last reduced, in order of calls
  bool in_pass = false;                     // the running backward has reached it
  std::uint64_t recovery_count = 0;         // Device::recoveries() when it was made
};

// One call of a unit for training, and its part of backward.
struct Call {
  std::weak_ptr<Unit> unit;
  std::weak_ptr<Forward> forward;
  std::shared_ptr<const Call> outer;  // the call around it
  bool entered = false;               // its part of backward has begun
  // The call around it has recorded nodes before this one. Backward visits those last, so it
  // leaves this call first, and the call around it later.
  bool ends_first = false;

  bool is_inside(const Call& other) const noexcept { return within(other) != nullptr; }
  bool ends_before(const Call& other) const noexcept {
    const Call* const part = within(other);
    return part && part->ends_first;
  }
  // Whether the running backward has it still ahead.
  bool is_due() const noexcept {
    const auto f = forward.lock();
    return !entered && f && f->in_pass;
  }

 private:
  // The call directly inside `other` that holds this one, or is it.
  const Call* within(const Call& other) const noexcept {
    for (const Call* c = this; c->outer; c = c->outer.get())
      if (c->outer.get() == &other) return c;
    return nullptr;
  }
};

// The nodes of one call of a unit's module for training, as backward sees them.
class UnitRegion final : public autograd::Region {
 public:
  // For a call of the unit that begins: null without gradients; in the second run of a recomputed
  // function the region that the first run has kept.
  static std::shared_ptr<UnitRegion> of_call(const std::shared_ptr<Unit>& unit);
  // `outer`: the region around it, of a unit under the same root, or null. `recomputed`: its nodes
  // come in backward.
  UnitRegion(std::shared_ptr<Unit> unit, const UnitRegion* outer, bool recomputed);

  void on_backward_begin() override;
  void on_backward_end() override;

  Unit& unit() const noexcept { return *unit_; }
  const std::shared_ptr<Call>& call() const noexcept { return call_; }
  const std::shared_ptr<Forward>& forward() const noexcept { return forward_; }
  // Tells the unit, once, that the call's part of backward begins, and that it has ended.
  void enter() noexcept;
  void leave() noexcept;

 private:
  // Nodes of the second run are made inside of `outer`'s part of backward.
  void rejoin(const UnitRegion* outer) noexcept;

  std::shared_ptr<Unit> unit_;
  std::shared_ptr<Forward> forward_;
  std::shared_ptr<Call> call_;
  bool recomputed_ = false;
  bool is_entered_ = false;
};

}  // namespace tessera::shard
