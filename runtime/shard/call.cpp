#include "runtime/shard/call.hpp"

#include <utility>

#include "runtime/shard/unit.hpp"
#include "tessera/autograd/recompute.hpp"

namespace tessera::shard {

std::shared_ptr<UnitRegion> UnitRegion::of_call(const std::shared_ptr<Unit>& unit) {
  auto* const recomputed = autograd::RecomputedRegions::current();
  const bool first_run = recomputed && recomputed->is_first_run();
  if (!first_run && !autograd::grad_enabled()) return nullptr;
  const auto* outer = dynamic_cast<UnitRegion*>(autograd::current_region().get());
  if (outer && outer->unit().context() != unit->context()) outer = nullptr;
  std::shared_ptr<UnitRegion> region;
  if (recomputed && autograd::in_backward())
    region = std::dynamic_pointer_cast<UnitRegion>(recomputed->take([&](autograd::Region& kept) {
      const auto* mine = dynamic_cast<UnitRegion*>(&kept);
      return mine && mine->unit_ == unit;
    }));
  if (region)
    region->rejoin(outer);
  else
    region = std::make_shared<UnitRegion>(unit, outer, first_run);
  if (first_run) recomputed->keep(region);
  return region;
}

UnitRegion::UnitRegion(std::shared_ptr<Unit> unit, const UnitRegion* outer, bool recomputed)
    : unit_(std::move(unit)),
      forward_(outer ? outer->forward_ : std::make_shared<Forward>()),
      call_(std::make_shared<Call>()),
      recomputed_(recomputed) {
  forward_->recovery_count = unit_->context()->device().recoveries();
  call_->unit = unit_;
  call_->forward = forward_;
  call_->outer = outer ? outer->call_ : nullptr;
  call_->ends_first = outer && (recomputed || outer->nodes() > 0);
  forward_->opened.push_back(unit_);
}

// What is recomputed runs inside of a node of the region around all of it.
void UnitRegion::rejoin(const UnitRegion* outer) noexcept {
  call_->ends_first = outer && (!outer->recomputed_ || outer->nodes() > 0);
}

void UnitRegion::on_backward_begin() {
  unit_->expect_no_recovery_since(forward_->recovery_count);
  unit_->context()->enter(*this);
}

void UnitRegion::on_backward_end() {
  unit_->context()->leave(*this);
  leave();
  unit_->close();
  unit_->reduce();
}

void UnitRegion::enter() noexcept {
  if (!std::exchange(is_entered_, true)) unit_->enter_call();
}
void UnitRegion::leave() noexcept {
  if (std::exchange(is_entered_, false)) unit_->leave_call();
}

}  // namespace tessera::shard
