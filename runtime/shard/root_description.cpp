// What a root will do, as data; and the plan of another root, which has planned a step.
#include <algorithm>

#include "runtime/shard/root.hpp"
#include "runtime/shard/unit.hpp"
#include "runtime/shard/unit_agreement.hpp"

namespace tessera::shard {

ShardPlan Root::describe() const {
  ShardPlan plan;
  plan.ranks = group_->size();
  plan.replicas = mesh().replicas();
  std::vector<AssumedCall> calls = calls_;
  for (AssumedCall& call : calls)  // set_unshard_in_backward may have come since
    if (const auto called = unit(call.unit); called && !called->shards().is_slice())
      call.is_read_in_backward = called->is_read_in_backward();
  const std::vector<UnitNeeds> needs = this->needs();
  std::vector<SlotUse> uses = assumed_step(needs, calls);
  join_at_turn(uses);
  std::vector<int> gathers(units_.size()), pieces(units_.size());  // of each unit
  for (const SlotUse& use : uses)
    ++(use.kind == SlotKind::parameters ? gathers : pieces)[static_cast<std::size_t>(use.unit)];
  for (std::size_t i = 0; i < units_.size(); ++i)
    if (const auto unit = units_[i].lock())
      plan.units.push_back(unit->describe(
          gathers[i], pieces[i] / std::max(static_cast<int>(needs[i].pieces.size()), 1)));
  plan.forwards_ahead = forwards_ahead_;
  plan.arena_bytes = slots_->bytes();
  plan.most_alive_bytes = slots_->most_alive();
  plan.is_assumed = slots_->is_new();
  if (gradients_) plan.symmetric_gradient_bytes = gradients_->bytes();
  if (host_link_) {
    plan.offload_device_bytes = host_link_->device_bytes();
    plan.offload_host_bytes = host_link_->host_bytes();
  }
  return plan;
}

ShardCounters Root::counters() const {
  ShardCounters counters = counters_;
  counters.unplanned_slots = slots_->unplanned();
  counters.slot_plans = slots_->made();
  return counters;
}

void Root::follow_slots_of(Root& planned) {
  TESSERA_EXPECT(planned.has_run_,
                 "shard_plan: the step has not called the model that it returned; call that model "
                 "in the step");
  expect_as_planned(units_, planned.units_);
  planned.slots_->begin_step(true);  // so its last step is over
  expect_same_plans(mesh(), planned.slots_->fingerprint_of_plans());
  slots_->adopt(*planned.slots_);
  has_run_ = true;
}

}  // namespace tessera::shard
