#include "runtime/shard/context.hpp"

#include <algorithm>

#include "runtime/shard/unit.hpp"
#include "runtime/shard/unit_region.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {
namespace {

std::shared_ptr<Unit> unit_of(nn::Module& module) {
  return std::dynamic_pointer_cast<Unit>(module.hook());
}

// The largest number of units that have slots of the common rings and are open inside one another.
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
    TESSERA_EXPECT(unit->shards().is_materialized() || unit->shards().layout.gather_bytes == 0,
                   "unit '", name, "' has no memory yet; call materialize on the model first");
    const World& world = unit->shards().options.mesh.world();
    TESSERA_EXPECT(!context->world_ || context->world_ == &world, "fully_shard: unit '", name,
                   "' lies on another mesh than its root; give all units of a model one mesh");
    context->world_ = &world;
    context->device_ = world.device();
    units.emplace_back(name, unit.get());
    context->units_.push_back(unit);
  }
  for (const auto& [name, unit] : units)
    unit->join(context, name.empty() ? "(root)" : name, name.empty());
  try {
    context->size_slots(nesting_of(units));
    context->allocate_slots();
    context->resume();
  } catch (...) {
    context->dissolve();
    throw;
  }
}

// Queued collectives may still use the arena.
Context::~Context() {
  if (arena_) device_.context().keep(std::move(arena_));
}

// The one formula of the slots: as many as units are gathered ahead, or reduced, at a time, and one
// for each unit that is open inside another. The root is open around all others, so it has slots of
// its own, as has a unit that stays open.
void Context::size_slots(int nesting) {
  int prefetch = 1, in_flight = 1;
  for (const auto& weak : units_) {
    const std::shared_ptr<Unit> unit = weak.lock();
    const UnitShards& shards = unit->shards();
    prefetch = std::max(prefetch, shards.options.prefetch_depth);
    in_flight = std::max(in_flight, shards.options.reductions_in_flight);
    const std::int64_t gather = shards.needs_slot() ? shards.layout.gather_bytes : 0,
                       reduce = shards.size() > 1 ? shards.layout.gradient_buffer_bytes : 0;
    if (unit->has_own_slot())
      resident_bytes_ += gather;
    else
      gather_slot_bytes_ = std::max(gather_slot_bytes_, gather);
    if (unit->is_root())
      resident_bytes_ += reduce;
    else
      reduce_slot_bytes_ = std::max(reduce_slot_bytes_, reduce);
  }
  // See Note [How many slots].
  gather_slots_ = gather_slot_bytes_ > 0 ? prefetch + nesting : 0;
  reduce_slots_ = reduce_slot_bytes_ > 0 ? in_flight + nesting : 0;
  arena_bytes_ =
      checked_add(resident_bytes_, checked_add(checked_mul(gather_slot_bytes_, gather_slots_),
                                               checked_mul(reduce_slot_bytes_, reduce_slots_)));
}

void Context::allocate_slots() {
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
    const UnitShards& shards = unit->shards();
    SlotRing* const own_gather = shards.needs_slot() && unit->has_own_slot()
                                     ? ring(shards.layout.gather_bytes, 1, "gather slots")
                                     : gather;
    SlotRing* const own_reduce =
        shards.size() > 1 && unit->is_root()
            ? ring(shards.layout.gradient_buffer_bytes, 1, "gradient slots")
            : reduce;
    unit->set_rings(own_gather, own_reduce);
  }
}

// --- backward ---

void Context::enter(Unit& unit) {
  schedule_end();
  unit.enter_call();
  entered_.push_back(&unit);
  const int depth = unit.shards().options.prefetch_depth;
  // The last blocks are prefetched before the root is gathered. The root's slot is in use until
  // forward has ended, so its gather waits, and every gather queued behind it would wait as well.
  if (unit.is_root()) prefetch(depth);
  unit.gather();
  unit.open();
  if (!unit.is_root()) prefetch(depth);
}

void Context::leave(Unit& unit) {
  unit.leave_call();
  entered_.pop_back();
  if (unit.is_in_backward()) return;
  unit.close();
  unit.reduce();
  // Most units use their parameters once, and stay entered until the calls inside have ended.
  for (Unit* const outer : entered_) outer->note_uses();
}

// Gathers the units of the `depth` calls that backward enters next.
void Context::prefetch(int depth) {
  if (depth == 0) return;
  autograd::for_each_upcoming_region([&](autograd::Region& region) {
    const auto* const call = dynamic_cast<UnitRegion*>(&region);
    const std::shared_ptr<Unit> unit = call ? call->unit() : nullptr;
    if (!unit || unit->context().get() != this || unit->keeps_open()) return true;
    unit->gather();
    return --depth > 0;
  });
}

void Context::on_reduced(const Event& event) {
  ++counters.reductions;
  reduced_ = event;
}

// --- the pass ---

void Context::schedule_end() {
  if (in_pass_) return;
  auto pass = std::make_shared<Pass>();
  pass->context = shared_from_this();
  autograd::at_end_of_backward([pass] { pass->context->end_of_backward(); });
  ++pass_;
  in_pass_ = true;
}

// What is written to a unit outside of its calls, as to one that stays open, is reduced here.
void Context::end_of_backward() {
  for (const auto& weak : units_) {
    const std::shared_ptr<Unit> unit = weak.lock();
    if (!unit) continue;
    if (unit->owes_reduction()) unit->reduce();
    unit->close();
  }
  in_pass_ = false;
}

}  // namespace tessera::shard
