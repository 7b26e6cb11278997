#include "runtime/shard/context.hpp"

#include <algorithm>

#include "runtime/shard/unit.hpp"

namespace tessera::shard {
namespace {

std::shared_ptr<Unit> unit_of(nn::Module& module) {
  return std::dynamic_pointer_cast<Unit>(module.hook());
}

// The largest number of units, the root apart, that are open inside one another.
int nesting_of(const std::vector<std::pair<std::string, Unit*>>& units) {
  int deepest = 1;
  for (const auto& [name, unit] : units) {
    int depth = 0;
    for (const auto& [outer, other] : units)
      if (!other->is_root() && (outer == name || name.starts_with(outer + '.'))) ++depth;
    deepest = std::max(deepest, depth);
  }
  return deepest;
}

}  // namespace

void Context::build(nn::Module& root) {
  const std::shared_ptr<Context> context(new Context());
  root.named_parameters();  // sets the names that errors use
  std::vector<std::pair<std::string, Unit*>> units;
  for (const auto& [name, module] : root.named_modules()) {
    const std::shared_ptr<Unit> unit = unit_of(*module);
    if (!unit) continue;
    TESSERA_EXPECT(unit->context() == nullptr, "fully_shard: unit '", name,
                   "' has already run as a root of its own; call the outermost module first");
    TESSERA_EXPECT(unit->is_materialized() || unit->layout().gather_bytes == 0, "unit '", name,
                   "' has no memory yet; call materialize on the model first");
    const World& world = unit->options().mesh.world();
    TESSERA_EXPECT(!context->world_ || context->world_ == &world, "fully_shard: unit '", name,
                   "' lies on another mesh than its root; give all units of a model one mesh");
    context->world_ = &world;
    units.emplace_back(name, unit.get());
    context->units_.push_back(unit);
  }
  for (const auto& [name, unit] : units)
    unit->join(context, name.empty() ? "(root)" : name, name.empty());
  context->allocate(nesting_of(units));
}

void Context::allocate(int nesting) {
  std::int64_t run_bytes_max = 0;
  int prefetch = 1, in_flight = 1;
  for (const auto& weak : units_) {
    const std::shared_ptr<Unit> unit = weak.lock();
    prefetch = std::max(prefetch, unit->options().prefetch_depth);
    in_flight = std::max(in_flight, unit->options().reductions_in_flight);
    if (unit->needs_slot()) {
      if (unit->keeps_open())
        resident_bytes_ += unit->layout().gather_bytes;
      else
        gather_slot_bytes_ = std::max(gather_slot_bytes_, unit->layout().gather_bytes);
    }
    if (unit->size() > 1) {
      if (unit->is_root())
        resident_bytes_ += unit->layout().run_bytes;
      else
        run_bytes_max = std::max(run_bytes_max, unit->layout().run_bytes);
    }
  }
  reduce_slot_bytes_ = run_bytes_max;
  gather_slots_ = gather_slot_bytes_ > 0 ? prefetch + nesting : 0;
  reduce_slots_ = reduce_slot_bytes_ > 0 ? in_flight + nesting : 0;
  arena_bytes_ =
      checked_add(resident_bytes_, checked_add(checked_mul(gather_slot_bytes_, gather_slots_),
                                               checked_mul(reduce_slot_bytes_, reduce_slots_)));
  if (arena_bytes_ == 0) return;
  arena_ = world_->allocate_symmetric(arena_bytes_);

  DeviceContext& device = this->device().context();
  std::byte* at = arena_->data();
  const auto ring = [&](std::int64_t bytes, int count, const char* owner) -> SlotRing* {
    if (bytes == 0 || count == 0) return nullptr;
    rings_.push_back(std::make_unique<SlotRing>(device, at, bytes, count, owner));
    at += bytes * count;
    return rings_.back().get();
  };
  SlotRing* const gather = ring(gather_slot_bytes_, gather_slots_, "gather slots");
  SlotRing* const reduce = ring(reduce_slot_bytes_, reduce_slots_, "gradient slots");
  for (const auto& weak : units_) {
    const std::shared_ptr<Unit> unit = weak.lock();
    SlotRing* const own_gather = unit->needs_slot() && unit->keeps_open()
                                     ? ring(unit->layout().gather_bytes, 1, "gather slots")
                                     : gather;
    SlotRing* const own_reduce = unit->size() > 1 && unit->is_root()
                                     ? ring(unit->layout().run_bytes, 1, "gradient slots")
                                     : reduce;
    unit->set_rings(own_gather, own_reduce);
  }
}

void Context::called(const std::shared_ptr<UnitRegion>& region) {
  std::erase_if(order_, [](const auto& weak) { return weak.expired(); });
  order_.push_back(region);
}

void Context::skip(UnitRegion& region) {
  region.skip();
  Unit& unit = region.unit();
  if (unit.is_closed() && !unit.keeps_open()) {
    unit.gather();
    unit.open();
    unit.close();
  }
  if (unit.owes_reduction()) unit.reduce();
}

void Context::begins(UnitRegion& region) {
  schedule_end();
  if (region.unit().is_root()) return;
  std::size_t at = order_.size();
  for (std::size_t i = 0; i < order_.size(); ++i)
    if (order_[i].lock().get() == &region) at = i;
  if (at == order_.size())
    return;  // made by recomputation, or by a forward whose backward has already ended
  for (std::size_t i = order_.size(); i-- > at + 1;)
    if (const auto later = order_[i].lock(); later && !later->has_begun()) skip(*later);
  region.unit().gather();
  region.unit().open();
  int ahead = region.unit().options().prefetch_depth;
  for (std::size_t i = at; i-- > 0 && ahead > 0;)
    if (const auto next = order_[i].lock();
        next && !next->has_begun() && !next->unit().keeps_open()) {
      next->unit().gather();
      --ahead;
    }
}

void Context::schedule_end() {
  if (end_scheduled_) return;
  end_scheduled_ = true;
  autograd::at_end_of_backward([this] { end_of_backward(); });
}

void Context::end_of_backward() {
  end_scheduled_ = false;
  for (std::size_t i = order_.size(); i-- > 0;)
    if (const auto region = order_[i].lock(); region && !region->has_begun()) skip(*region);
  order_.clear();
  for (const auto& weak : units_) {
    const std::shared_ptr<Unit> unit = weak.lock();
    if (!unit) continue;
    if (unit->owes_reduction()) unit->reduce();
    if (!unit->is_closed()) unit->close();
  }
  if (reduced_.tick > 0) device().compute().wait(reduced_);
}

ShardPlan Context::plan() const {
  ShardPlan plan;
  plan.ranks = world_->size();
  for (const auto& weak : units_)
    if (const auto unit = weak.lock()) plan.units.push_back(unit->describe());
  plan.gather_slots = gather_slots_;
  plan.reduce_slots = reduce_slots_;
  plan.gather_slot_bytes = gather_slot_bytes_;
  plan.reduce_slot_bytes = reduce_slot_bytes_;
  plan.resident_bytes = resident_bytes_;
  plan.arena_bytes = arena_bytes_;
  return plan;
}

}  // namespace tessera::shard
