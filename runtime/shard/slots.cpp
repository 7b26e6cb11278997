#include "runtime/shard/slots.hpp"

#include <algorithm>
#include <utility>

#include "tessera/base/philox.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/detail/memory/step_memory.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {
namespace {

// Training, evaluation and saving are few.
constexpr std::size_t kMostSteps = 32;
// Which step comes next is asked of so many before it, and where these have not been seen, of
// fewer.
constexpr std::size_t kHistory = 8;
// Of a step. Where units are called without their root a step may never end, and a plan of so
// many uses takes a tenth of a second.
constexpr std::size_t kMostUses = 1 << 12;

}  // namespace

Slots::Slots(const RankGroup& group, std::vector<UnitNeeds> units,
             std::span<const AssumedCall> calls)
    : group_(group), units_(std::move(units)), planned_uses_(2 * units_.size()) {
  Ledger& ledger = Memory::of(group_.device().context()).ledger();
  owners_[0] = ledger.owner("gather slots");
  owners_[1] = ledger.owner("gradient slots");
  std::vector<SlotUse> assumed = assumed_step(units_, calls);
  join_at_turn(assumed);
  keep(std::move(assumed));
  follow(kept_.begin()->first);
  resize(kept_.begin()->second.plan.bytes);
}

Slots::~Slots() {
  for (Block& block : blocks_) group_.device().context().keep(std::move(block.memory));
}

// --- a step ---

// A step that had slots where no plan had them, or that kept to the plan of another, is planned
// from its uses, for the next time that it is expected: after the steps that it came after, with
// gradients or without. So steps that come again follow plans of their own, and what they leave for
// the next lies where it lay before.
void Slots::begin_step(bool trains) {
  steps_ += trains ? 1 : 0;
  if (StepMemory* const step = StepMemory::of(group_.device()); step && trains)
    step->before_replay([this] { ++steps_; });
  to_be_agreed_ = -1;
  if (are_plans_old_) plan_anew();
  std::vector<SlotUse> carried;
  for (Live& live : live_) {
    uses_[live.use].end = now_ + 1;  // and it goes on
    SlotUse use = uses_[live.use];
    use.begin = 0;
    use.ends_forward = false;
    use.stays = 0;
    use.is_carried = true;
    if (const Block& planned = blocks_[0]; live.slot.arena == planned.arena.get())
      use.offset = live.slot.data - planned.memory->data();
    live.use = carried.size();
    carried.push_back(use);
  }
  join_at_turn(uses_);
  const std::uint64_t ended = fingerprint(uses_);
  if (next_.size() >= 2 * kMostSteps * kHistory || kept_.size() == kMostSteps)
    next_.clear(), kept_.clear();
  const bool makes_plan = !is_planned_ || !(is_new_ || uses_.empty() || kept_.contains(ended));
  if (!uses_.empty()) {
    // What is assumed of the first steps may have served this one, too.
    const std::uint64_t plan = makes_plan || kept_.contains(ended) ? ended : followed_;
    for (const std::uint64_t before : histories(uses_, trains_)) next_[{before, trains_}] = plan;
    last_[trains_].insert(last_[trains_].begin(), ended);
    last_[trains_].resize(std::min(last_[trains_].size(), kHistory));
  }
  is_assumption_met_ = is_assumption_met_ || (is_new_ && is_planned_ && !uses_.empty());
  // Where a step does not keep to the plan of its own uses, what an earlier one has left was in
  // the way. With room for all that was taken it comes to rest.
  if (makes_plan && followed_ == ended) least_bytes_ = std::max(least_bytes_, this->bytes());
  if (makes_plan) {
    if (is_new_ && !is_assumption_met_) kept_.clear();  // nobody calls the units so
    is_new_ = false;
    ++made_;
    keep(uses_);
    follow(ended);
  }
  is_new_ = is_new_ && is_as_assumed_;  // from the next step on: this one tells ranks that differ
  trains_ = trains;
  const auto follows = [&](std::uint64_t before, bool training) {
    const auto next = next_.find({before, training});
    const bool is_known = next != next_.end() && kept_.contains(next->second);
    if (is_known) follow(next->second);
    return is_known;
  };
  const std::vector<std::uint64_t> known = histories(carried, trains);
  if (std::ranges::none_of(known, [&](std::uint64_t before) { return follows(before, trains); }))
    follows(known.back(), !trains);  // an evaluation gathers what a forward does

  uses_.assign(carried.begin(), carried.end());
  now_ = 1;
  is_planned_ = true;
  for (PlannedUses& planned : planned_uses_) planned.next = 0;

  wants_resize_ = wants_resize_ || makes_plan;
  resize_if_due();
}

std::vector<std::uint64_t> Slots::histories(std::span<const SlotUse> uses, bool trains) const {
  std::uint64_t open = fnv1a("open"), places = fnv1a("places");
  bool is_open = false;
  for (const SlotUse& use : uses) {
    if (!use.is_carried) continue;
    is_open = true;
    open = fnv1a(2 * use.unit + static_cast<int>(use.kind), open);
    places = fnv1a(use.offset, places);
  }
  std::vector<std::uint64_t> all{open};
  for (const std::uint64_t step : last_[trains]) all.push_back(fnv1a(step, all.back()));
  for (std::size_t i = 0, count = all.size(); is_open && i < count; ++i)
    all.push_back(fnv1a(places, all[i]));
  std::reverse(all.begin(), all.end());
  return all;
}

// The room that the plans need, once no slot is taken; a step that is captured can't wait for it.
void Slots::resize_if_due() {
  if (!wants_resize_ || !live_.empty() || group_.device().context().is_capturing()) return;
  wants_resize_ = false;
  std::int64_t bytes = least_bytes_;
  for (const auto& [step, kept] : kept_) bytes = std::max(bytes, kept.plan.bytes);
  if (bytes != this->bytes()) resize(bytes);
}

Slot Slots::take(int unit, SlotKind kind, std::int64_t bytes) {
  if (uses_.size() == kMostUses) begin_step(trains_);
  resize_if_due();  // of units that are open whenever the root is called
  const OwnerId owner = owners_[static_cast<std::size_t>(kind)];
  PlannedUses& known = planned_uses(unit, kind);
  const std::int64_t offset =
      known.next < known.offsets.size() ? known.offsets[known.next++] : std::int64_t{-1};
  Slot slot = offset >= 0 ? blocks_[0].arena->take(offset, bytes, owner) : Slot{};
  if (!slot.arena) slot = take_gap(bytes, owner);
  live_.push_back({slot, uses_.size()});
  uses_.push_back({.unit = unit, .kind = kind, .bytes = bytes, .begin = now_++});
  return slot;
}

Slots::Live& Slots::live(const Slot& slot) {
  const auto found = std::ranges::find(live_, slot.data, [](const Live& l) { return l.slot.data; });
  TESSERA_EXPECT(found != live_.end(), "Slots: the slot is not taken");
  return *found;
}

void Slots::give_back(const Slot& slot, bool ends_forward) {
  Live& found = live(slot);
  uses_[found.use].end = now_++;
  uses_[found.use].ends_forward = ends_forward;
  live_.erase(live_.begin() + (&found - live_.data()));
  slot.arena->give_back(slot);
}

bool Slots::stays(const Slot& slot) {
  SlotUse& use = uses_[live(slot).use];
  const PlannedUses& known = planned_uses(use.unit, use.kind);
  if (use.is_carried || known.next == 0 || use.stays == known.stays[known.next - 1]) return false;
  ++use.stays;
  return true;
}

Slot Slots::take_gap(std::int64_t bytes, OwnerId owner) {
  is_planned_ = false;
  ++unplanned_;
  for (const Block& block : blocks_)
    if (const std::int64_t gap = block.arena->best_gap(bytes); gap >= 0)
      return block.arena->take(gap, bytes, owner);
  add_block(bytes);
  return blocks_.back().arena->take(0, bytes, owner);
}

// --- plans ---

void Slots::keep(std::vector<SlotUse> uses) {
  SlotPlan plan = plan_slots(uses, units_);
  const std::uint64_t step = fingerprint(uses);
  kept_.insert_or_assign(step, Kept{std::move(uses), std::move(plan)});
}

void Slots::follow(std::uint64_t step) {
  if (followed_ == step) return;
  followed_ = step;
  for (PlannedUses& planned : planned_uses_) planned.offsets.clear(), planned.stays.clear();
  const Kept& kept = kept_.at(step);
  for (std::size_t i = 0; i < kept.uses.size(); ++i)
    if (const SlotUse& use = kept.uses[i]; !use.is_carried) {
      planned_uses(use.unit, use.kind).offsets.push_back(kept.plan.offsets[i]);
      planned_uses(use.unit, use.kind).stays.push_back(use.stays);
    }
}

// --- memory ---

std::int64_t Slots::bytes() const noexcept {
  std::int64_t sum = 0;
  for (const Block& block : blocks_) sum += block.memory->bytes();
  return sum;
}

// Before the new memory comes the old one goes, so nothing may still use it, here or on a peer: a
// collective ends on a rank when no peer will touch that rank's bytes again.
void Slots::resize(std::int64_t bytes) {
  if (!blocks_.empty()) group_.device().synchronize();
  blocks_.clear();
  if (bytes > 0) add_block(bytes);
}

void Slots::add_block(std::int64_t bytes) {
  std::shared_ptr<SymmetricMemory> memory =
      group_.allocate_symmetric(round_up(bytes, kAlignmentBytes), "the slots of a model");
  auto arena = std::make_unique<Arena>(group_.device().context(), memory->data(), memory->bytes());
  blocks_.push_back({std::move(memory), std::move(arena)});
}

void Slots::set_reductions_in_flight(int unit, int reductions) {
  was_set_ = true;
  if (to_be_agreed_ < 0) to_be_agreed_ = unit;
  int& known = units_[static_cast<std::size_t>(unit)].reductions_in_flight;
  if (std::exchange(known, reductions) != reductions) are_plans_old_ = true;
}

void Slots::plan_anew() {
  are_plans_old_ = false;
  for (auto& [step, kept] : kept_) kept.plan = plan_slots(kept.uses, units_);
  const std::uint64_t step = std::exchange(followed_, 0);
  if (kept_.contains(step)) follow(step);
  least_bytes_ = 0;
  wants_resize_ = true;
}

std::int64_t Slots::most_alive() const noexcept {
  std::int64_t most = 0;
  for (const auto& [step, kept] : kept_) most = std::max(most, kept.plan.most_alive);
  return most;
}

void Slots::adopt(const Slots& planned) {
  kept_ = planned.kept_;
  next_ = planned.next_;
  is_new_ = planned.is_new_;
  is_assumption_met_ = planned.is_assumption_met_;
  least_bytes_ = planned.least_bytes_;
  wants_resize_ = true;
  resize_if_due();
}

std::uint64_t Slots::fingerprint_of_plans() const {
  std::string all;
  for (const auto& [step, kept] : kept_) {
    all += concat(step, ' ', kept.plan.bytes, ':');
    for (const std::int64_t offset : kept.plan.offsets) all += concat(offset, ' ');
  }
  for (const auto& [after, step] : next_)
    all += concat(after.first, after.second ? '>' : '|', step, ' ');
  return fnv1a(all);
}

void Slots::restart() {
  TESSERA_EXPECT(live_.empty(), "Slots::restart: ", live_.size(), " slots are taken");
  for (const Block& block : blocks_) block.arena->restart();
  steps_ = 0;
  uses_.clear();
  now_ = 0;
  is_planned_ = true;
  is_new_ = is_new_ && blocks_.size() <= 1;
  is_assumption_met_ = false;  // one rank may have begun a step more
  next_.clear();
  for (auto& steps : last_) steps = {0};
  for (PlannedUses& planned : planned_uses_) planned.next = 0;
}

}  // namespace tessera::shard
