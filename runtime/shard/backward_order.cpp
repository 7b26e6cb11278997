#include "runtime/shard/backward_order.hpp"

#include <utility>

#include "runtime/shard/unit.hpp"
#include "runtime/shard/unit_region.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {

void BackwardOrder::enter(Unit& unit, const BackwardNeeds& needs) {
  schedule_end();
  unit.calls().enter(needs.version);
  entered_.push_back(&unit);
  // What backward enters first comes before the root, whose slot is in use until forward has ended,
  // so that its gather waits, and all behind it; the others come behind: compute waits for it, too.
  if (unit.shards().is_root()) prefetch(unit, 1);
  if (needs.parameters) {
    unit.gather();
    unit.open();
  }
  if (needs.gradients) unit.take_buffer(needs.ends_round && call_ends_next());
  prefetch(unit, unit.shards().options().prefetch_depth);
}

void BackwardOrder::leave(Unit& unit, const BackwardNeeds& needs) {
  entered_.pop_back();
  if (!unit.calls().leave(needs.ends_round)) return unit.note_uses();
  if (unit.trains()) unit.reduce();  // on some ranks pieces have gone long before
  if (unit.reshards_after_backward() && !unit.calls().is_running()) unit.close();
  // Most units use their parameters once, and stay entered until the calls inside have ended.
  for (Unit* const outer : entered_) outer->note_uses();
}

// Gathers the units of the next `depth` calls in backward, or those that the program has listed.
void BackwardOrder::prefetch(Unit& unit, int depth) {
  if (!unit.prefetch_list(Unit::Prefetch::backward).empty()) {
    if (!unit.calls().awaits_round()) unit.gather_listed(Unit::Prefetch::backward);
    return;
  }
  autograd::for_each_upcoming_step([&](autograd::Region& region, bool begins) {
    const auto* const call = begins ? UnitRegion::of(region) : nullptr;
    const std::shared_ptr<Unit> unit = call ? call->unit() : nullptr;
    if (!unit || unit->root().get() != &root_ || unit->keeps_open() ||
        unit->shards().parameters().empty() || !call->needs().parameters)
      return true;
    unit->gather();
    return --depth > 0;
  });
}

// Whether the call that is entered has none of another unit inside.
bool BackwardOrder::call_ends_next() const {
  bool ends = false;
  autograd::for_each_upcoming_step([&](autograd::Region& region, bool begins) {
    const bool is_call = UnitRegion::of(region) != nullptr;
    ends = is_call && !begins;
    return !is_call;
  });
  return ends;
}

void BackwardOrder::schedule_end() {
  if (in_pass_) return;
  const auto pass = std::shared_ptr<Pass>(new Pass{root_.shared_from_this(), *this});
  autograd::at_end_of_backward([this, pass] {
    end_of_forward(0);
    in_pass_ = false;
  });
  ++pass_;
  in_pass_ = true;
}

// Not only at the end of a pass: where one rank goes back along two forwards in one, another may
// skip either in a pass of its own. What is written to a unit outside of its calls, as to one that
// stays open, is reduced here, and a round of which this pass has not come to the first call. A
// unit whose call goes on stays open, and is reduced on all ranks, whichever have used it.
void BackwardOrder::end_of_forward(std::uint64_t forward) {
  for (const auto& weak : root_.units()) {
    const std::shared_ptr<Unit> unit = weak.lock();
    if (!unit) continue;
    unit->owes_reduction(forward) ? unit->reduce() : unit->reduce_given();
    if (unit->reshards_after_backward() && !unit->calls().is_running()) unit->close();
  }
  for (const auto& root : Root::all()) {
    const std::shared_ptr<Root> other = root.lock();
    if (!other || other.get() == &root_ || &other->device().context() != &root_.device().context())
      continue;
    for (const auto& weak : other->units())
      if (const auto unit = weak.lock();
          unit && unit->owes_kept() && unit->calls().entered() == 0 && other->is_valid())
        unit->reduce();
  }
}

// Backward ends the root's part behind what was opened for it and used before its call, so that all
// ranks reduce that: unless other forwards lie between, of which each rank may go back apart.
std::uint64_t BackwardOrder::begin_recorded() {
  const std::uint64_t at = std::exchange(opened_at_, 0);
  if (at == 0) return 0;
  const std::uint64_t forward = autograd::forwards() + (autograd::in_call() ? 0 : 1);
  for (const auto& weak : root_.units())
    if (const auto unit = weak.lock()) unit->note_forward(forward);
  return opened_after_ == autograd::forwards() ? at : 0;
}

void BackwardOrder::note_opened() {
  if (opened_at_ > 0) return;
  opened_at_ = autograd::next_number();
  opened_after_ = autograd::forwards();
}

void BackwardOrder::abandon_pass() noexcept {
  in_pass_ = false;
  entered_.clear();
  for (const auto& weak : root_.units())
    if (const std::shared_ptr<Unit> unit = weak.lock()) unit->abandon_backward();
  try {
    if (reduced_.tick > 0) root_.device().compute().wait(reduced_);
  } catch (...) {
    root_.device().context().fail_late();
  }
}

}  // namespace tessera::shard
