// The slots of all units under one root: where each lies, and in which arena.
//
// Units take and give back in the order of their calls, which is the same on every rank, and so are
// the uses of a step, the plan that is made from them, and every address. Before the first step
// the plan assumes that each module is called once; where a step takes a slot that its plan does
// not have, or has no room for, it lies in a gap, or in memory that all ranks add, and from the
// uses of that step the next one like it is planned.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/shard/slot_plan.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/memory/arena.hpp"

namespace tessera::shard {

class Slots {
 public:
  // Collective. `calls`: of the first step, as far as one may guess.
  Slots(const RankGroup& group, std::vector<UnitNeeds> units, std::span<const AssumedCall> calls);
  // Queued collectives may still use its memory, so the device keeps it.
  ~Slots();
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  // Before the first step: the plans of `planned`, for the same units, whose steps are over.
  // Collective.
  void adopt(const Slots& planned);
  // Of all plans and what comes after what: equal on ranks that may follow them.
  std::uint64_t fingerprint_of_plans() const;
  // A forward of the root begins, and with it a step; `trains`: gradients are enabled. Collective
  // where the last one made a plan.
  void begin_step(bool trains);
  // With gradients. Reductions say it: where no gather tells, who leaves a backward out is told.
  std::uint64_t steps() const noexcept { return steps_; }
  // A slot for the unit; Arena::begin_use comes before its first use.
  Slot take(int unit, SlotKind kind, std::int64_t bytes);
  // `ends_forward`: by a call that backward comes to.
  void give_back(const Slot& slot, bool ends_forward);
  // Whether a slot that such a call would give back stays taken, as the plan has it.
  bool stays(const Slot& slot);
  // Whether it is given back by the unit's calls for training, from here on. Steps do otherwise
  // than was assumed, then: they are planned from their own uses, though slots may do without.
  void set_keeps_open(int unit, bool keeps_open) {
    units_[static_cast<std::size_t>(unit)].keeps_open = keeps_open;
    is_as_assumed_ = false;
  }
  // UnitNeeds'. All plans are made anew when the next step begins.
  void set_reductions_in_flight(int unit, int reductions);
  // The first unit that was set since the step began, to another value or not; negative for none.
  int to_be_agreed() const noexcept { return to_be_agreed_; }

  std::int64_t bytes() const noexcept;
  // The least that any plan of the steps so far would need.
  std::int64_t most_alive() const noexcept;
  // How many slots lay where no plan had them, and how many plans were made from steps.
  std::uint64_t unplanned() const noexcept { return unplanned_; }
  std::uint64_t made() const noexcept { return made_; }

  // After a failure, when every slot was given back and nothing runs.
  void restart();
  // Whether no step has made a plan, and whether every rank has it as all made it, whatever the
  // steps since were.
  bool is_new() const noexcept { return is_new_; }
  bool is_as_made() const noexcept { return is_new_ && !was_set_; }

 private:
  struct Block {
    std::shared_ptr<SymmetricMemory> memory;
    std::unique_ptr<Arena> arena;
  };
  struct Live {
    Slot slot;
    std::size_t use;  // in uses_
  };
  // Where the slots of one kind of one unit lie, in the order of its uses in a step.
  struct PlannedUses {
    std::vector<std::int64_t> offsets;
    std::vector<int> stays;
    std::size_t next = 0;
  };
  struct Kept {
    std::vector<SlotUse> uses;
    SlotPlan plan;
  };

  PlannedUses& planned_uses(int unit, SlotKind kind) {
    return planned_uses_[2 * static_cast<std::size_t>(unit) + static_cast<std::size_t>(kind)];
  }
  Live& live(const Slot& slot);
  void keep(std::vector<SlotUse> uses);
  void follow(std::uint64_t step);
  void plan_anew();
  // Keys of next_ for the step with these uses, at least those from before it: what is open as it
  // begins, behind the last steps of its kind; first for all that are known, then for fewer. Where
  // something is open, these with the places where it lies, and then without.
  std::vector<std::uint64_t> histories(std::span<const SlotUse> uses, bool trains) const;
  void resize_if_due();
  void resize(std::int64_t bytes);
  void add_block(std::int64_t bytes);
  Slot take_gap(std::int64_t bytes, OwnerId owner);

  const RankGroup& group_;
  std::vector<UnitNeeds> units_;
  OwnerId owners_[2];          // by SlotKind
  std::vector<Block> blocks_;  // the first is the plans'
  std::uint64_t unplanned_ = 0, made_ = 0;
  bool is_new_ = true, is_assumption_met_ = false, is_as_assumed_ = true;

  // --- the step that runs ---
  std::vector<SlotUse> uses_;
  std::vector<Live> live_;
  std::int64_t now_ = 0, least_bytes_ = 0;
  std::uint64_t steps_ = 0, followed_ = 0;  // whose plan planned_uses_ are
  bool is_planned_ = true;                  // so far
  bool trains_ = true, are_plans_old_ = false, was_set_ = false, wants_resize_ = false;
  int to_be_agreed_ = -1;
  std::vector<PlannedUses> planned_uses_;

  // --- steps by their fingerprints ---
  std::map<std::uint64_t, Kept> kept_;
  // Of what came before a step, and whether it trains, its plan.
  std::map<std::pair<std::uint64_t, bool>, std::uint64_t> next_;
  std::vector<std::uint64_t> last_[2]{{0}, {0}};  // by whether they trained, from the newest
};

}  // namespace tessera::shard
