#include "runtime/shard/unit_region.hpp"

#include "runtime/shard/unit.hpp"

namespace tessera::shard {

UnitRegion::UnitRegion(const std::shared_ptr<Unit>& unit, const BackwardNeeds& needs)
    : unit_(unit), recovery_count_(unit->root()->device().recoveries()), needs_(needs) {}

void UnitRegion::on_backward_begin() {
  const std::shared_ptr<Unit> unit = unit_.lock();
  if (!unit) return;
  unit->expect_no_recovery_since(recovery_count_);
  unit->root()->backward().enter(*unit, needs_);
}

void UnitRegion::on_backward_end() {
  const std::shared_ptr<Unit> unit = unit_.lock();
  if (!unit) return;
  unit->root()->backward().leave(*unit, needs_);
  if (!unit->shards().is_root()) return;  // a head called by itself leaves open what others need
  bool is_last = true;
  autograd::for_each_upcoming_step([&](autograd::Region&, bool) { return is_last = false; });
  if (is_last) unit->root()->backward().end_of_forward(autograd::forward_of_step());
}

void UnitRegion::on_backward_inside() {
  if (const std::shared_ptr<Unit> unit = unit_.lock()) unit->root()->backward().schedule_end();
}

}  // namespace tessera::shard
