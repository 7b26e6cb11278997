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

// The number of the innermost unit around `name`; -1 for none.
int parent_of(const std::string& name, const std::vector<std::pair<std::string, Unit*>>& units) {
  int parent = -1;
  for (std::size_t i = 0; i < units.size() && units[i].first != name; ++i)
    if (units[i].first.empty() || name.starts_with(units[i].first + '.'))
      parent = static_cast<int>(i);
  return parent;
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
  context->forwards_ahead_ =
      static_cast<std::size_t>(units[0].second->shards().options.forwards_ahead);
  context->forwards_.reserve(context->forwards_ahead_);
  for (std::size_t i = 0; i < units.size(); ++i)
    units[i].second->join(context, i == 0 ? "(root)" : units[i].first, static_cast<int>(i));
  try {
    std::vector<UnitNeeds> needs;
    for (const auto& [name, unit] : units) needs.push_back(unit->needs(parent_of(name, units)));
    context->slots_ = std::make_unique<Slots>(*context->world_, std::move(needs));
    for (const auto& [name, unit] : units) unit->set_slots(context->slots_.get());
    context->resume();
  } catch (...) {
    context->dissolve();
    throw;
  }
}

// --- forward ---

// Where the host learns what has run: what it prepares is used again, and nothing is polled.
void Context::begin_forward() {
  if (forwards_.size() == forwards_ahead_) {
    device().block(forwards_.front());
    forwards_.erase(forwards_.begin());
  }
  slots_->begin_step();
}

void Context::end_forward() { forwards_.push_back(device().compute().record()); }

// --- backward ---

void Context::enter(Unit& unit, const BackwardNeeds& needs) {
  schedule_end();
  unit.enter_call(needs.gradients);
  entered_.push_back(&unit);
  const int depth = unit.shards().options.prefetch_depth;
  // The last blocks are prefetched before the root is gathered. The root's slot is in use until
  // forward has ended, so its gather waits, and every gather queued behind it would wait as well.
  if (unit.is_root()) prefetch(depth);
  if (needs.parameters) {
    unit.gather();
    unit.open();
  }
  if (needs.gradients) unit.take_buffer();
  if (!unit.is_root()) prefetch(depth);
}

void Context::leave(Unit& unit) {
  unit.leave_call();
  entered_.pop_back();
  if (unit.is_in_backward()) return;
  unit.close();
  if (unit.trains()) unit.reduce();
  // Most units use their parameters once, and stay entered until the calls inside have ended.
  for (Unit* const outer : entered_) outer->note_uses();
}

// Gathers the units of the `depth` calls that backward enters next.
void Context::prefetch(int depth) {
  if (depth == 0) return;
  autograd::for_each_upcoming_region([&](autograd::Region& region) {
    const auto* const call = dynamic_cast<UnitRegion*>(&region);
    const std::shared_ptr<Unit> unit = call ? call->unit() : nullptr;
    if (!unit || unit->context().get() != this || unit->keeps_open() || !call->needs().parameters)
      return true;
    unit->gather();
    return --depth > 0;
  });
}

void Context::on_reduced(const Event& event) {
  ++reductions_;
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
