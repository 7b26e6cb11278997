#include "runtime/shard/unit_region.hpp"

#include "runtime/shard/unit.hpp"

namespace tessera::shard {

UnitRegion::UnitRegion(const std::shared_ptr<Unit>& unit, const BackwardNeeds& needs)
    : unit_(unit), recovery_count_(unit->context()->device().recoveries()), needs_(needs) {}

void UnitRegion::on_backward_begin() {
  const std::shared_ptr<Unit> unit = unit_.lock();
  if (!unit) return;
  unit->expect_no_recovery_since(recovery_count_);
  unit->context()->enter(*unit, needs_);
}

void UnitRegion::on_backward_end() {
  if (const std::shared_ptr<Unit> unit = unit_.lock()) unit->context()->leave(*unit, needs_);
}

}  // namespace tessera::shard
