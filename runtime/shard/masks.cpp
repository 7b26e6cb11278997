// What follows where parameters were frozen or thawed between steps: at the root's next call
// slices, gradients and slots are made anew.
#include <algorithm>

#include "runtime/shard/unit.hpp"
#include "runtime/shard/unit_region.hpp"

namespace tessera::shard {

void Context::follow_masks(nn::Module& root) {
  if (autograd::in_backward()) return;
  const auto is_laid_out = [](const auto& weak) {
    const std::shared_ptr<Unit> unit = weak.lock();
    return !unit || !unit->shards().group || unit->shards().group->is_laid_out;
  };
  if (std::all_of(units_.begin(), units_.end(), is_laid_out)) return;
  for (const auto& weak : units_)
    if (const auto unit = weak.lock(); unit && unit->shards().group) {
      const FlatGroup& group = *unit->shards().group;
      for (std::size_t i = 0; i < group.unreduced.size(); ++i)
        if (const auto p = group.trained(i).parameter.lock(); p && p->trainable)
          group.expect_reduced("parameters were frozen or thawed", i, i + 1);
    }
  TESSERA_EXPECT(autograd::forget_forwards([this](autograd::Region& region) {
                   const auto* const call = UnitRegion::of(region);
                   const auto called = call ? call->unit() : nullptr;
                   return called && called->context().get() == this;
                 }),
                 "parameters of '", unit(0)->name(),
                 "' were frozen or thawed while a forward of it has still to go backward; go "
                 "backward first, or drop what it gave");
  device().synchronize();
  for (std::size_t i = 0; i < units_.size(); ++i)
    if (const std::shared_ptr<Unit> unit = units_[i].lock()) {
      unit->close();
      i < modules_ ? unit->set_slots(nullptr, nullptr, nullptr) : unit->leave_root();
    }
  units_.resize(modules_);
  slots_ = nullptr;
  replicas_ = nullptr;
  host_link_ = nullptr;
  lay_out(root);
}

void UnitShards::expect_gradients() const {
  if (!group || group->is_laid_out) return;
  for (const auto& part : {parameters, streamed})
    for (const auto& p : part)
      TESSERA_EXPECT(!p->trainable || p->has_gradient(), "unit '", name, "': parameter '", p->name,
                     "' was thawed since the root's last call, and the unit is called by itself; "
                     "call the root first, which makes room for its gradient");
}

}  // namespace tessera::shard
