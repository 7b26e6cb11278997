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

}  // namespace

void Context::build(nn::Module& root) {
  const std::shared_ptr<Context> context(new Context());
  std::vector<std::pair<std::string, std::shared_ptr<Unit>>> units;  // join when all have passed
  TESSERA_EXPECT(
      !unit_of(root)->calls().is_list(), "unit '", unit_of(root)->name(),
      "' is a list of modules and can't be the root; call fully_shard on a module around "
      "them too, and that module first");
  root.named_parameters();  // sets the names that errors use
  for (const auto& [name, module] : root.named_modules()) {
    const std::shared_ptr<Unit> unit = unit_of(*module);
    if (!unit) continue;
    if (unit->calls().is_list()) {
      const auto known = std::ranges::find(units, unit, [](const auto& u) { return u.second; });
      if (known != units.end()) {
        known->first += ", " + name;
        continue;
      }
    }
    TESSERA_EXPECT(unit->context() == nullptr, "fully_shard: unit '", name,
                   "' has already run as a root of its own; call the outermost module first");
    check_under_root(unit->shards(), name, unit_of(root)->shards());
    context->units_.push_back(unit);
    units.emplace_back(name.empty() ? "(root)" : name, unit);
  }
  context->group_ = &context->mesh().shard_group();
  context->device_ = context->group_->device();
  context->take_number();
  for (std::size_t i = 0; i < units.size(); ++i)
    units[i].second->join_root(context, units[i].first, static_cast<int>(i));
  context->modules_ = context->units_.size();
  context->rounds_.reserve(context->modules_);
  context->forwards_ahead_ = context->unit(0)->shards().options.forwards_ahead;
  context->lay_out(root);
}

void Context::lay_out(nn::Module& root) {
  try {
    for (const auto& unit : units_) unit.lock()->control().name_decisions();  // of named units now
    expect_alike();
    for (const auto& unit : units_) {
      unit.lock()->control().check(*this);
      unit.lock()->lay_out();
    }
    cut_streamed(unit(0)->shards().options.slice_bytes);
    for (const auto& weak : units_) {
      const std::shared_ptr<Unit> unit = weak.lock();
      unit->set_neighbours(neighbours(unit->shards().options.reshard_after_forward));
    }
    // The tables of slices are made now, not before the first step: were one that fails to skip
    // them, they would be missing in the next.
    device().block(device().compute().record());
    calls_ = assumed_calls(root);
    slots_ = std::make_unique<Slots>(*group_, needs(), calls_);
    make_replicas();
    make_host_link();
    for (const auto& unit : units_)
      unit.lock()->set_slots(slots_.get(), replicas_.get(), host_link_.get());
    resume();
  } catch (...) {
    dissolve();
    throw;
  }
}

const DeviceMesh& Context::mesh() const { return unit(0)->shards().options.mesh; }

// --- forward ---

// Where the host learns what has run: what it prepares is used again, and nothing is polled.
void Context::begin_forward(std::vector<Event>& forwards, bool is_root) {
  if (std::ssize(forwards) == forwards_ahead_) {
    if (!device().context().is_capturing()) device().block(forwards.front());
    forwards.erase(forwards.begin());
  }
  if (!is_root) return;
  if (may_hold_units_) close_stale_units();
  if (slots_->to_be_agreed() >= 0) expect_alike();
  slots_->begin_step(autograd::grad_enabled());
  has_run_ = true;
}

// --- backward ---

void Context::enter(Unit& unit, const BackwardNeeds& needs) {
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
  prefetch(unit, unit.shards().options.prefetch_depth);
}

void Context::leave(Unit& unit, const BackwardNeeds& needs) {
  entered_.pop_back();
  if (!unit.calls().leave(needs.ends_round)) return unit.note_uses();
  if (unit.trains()) unit.reduce();  // on some ranks pieces have gone long before
  if (unit.control().reshards_after_backward() && !unit.calls().is_running()) unit.close();
  // Most units use their parameters once, and stay entered until the calls inside have ended.
  for (Unit* const outer : entered_) outer->note_uses();
}

// Gathers the units of the next `depth` calls in backward, or those that the program has listed.
void Context::prefetch(Unit& unit, int depth) {
  if (!unit.control().prefetch_list(UnitControl::Prefetch::backward).empty()) {
    if (!unit.calls().awaits_round()) unit.gather_listed(UnitControl::Prefetch::backward);
    return;
  }
  autograd::for_each_upcoming_step([&](autograd::Region& region, bool begins) {
    const auto* const call = begins ? UnitRegion::of(region) : nullptr;
    const std::shared_ptr<Unit> unit = call ? call->unit() : nullptr;
    if (!unit || unit->context().get() != this || unit->control().keeps_open() ||
        unit->shards().parameters.empty() || !call->needs().parameters)
      return true;
    unit->gather();
    return --depth > 0;
  });
}

// Whether the call that is entered has none of another unit inside.
bool Context::call_ends_next() const {
  bool ends = false;
  autograd::for_each_upcoming_step([&](autograd::Region& region, bool begins) {
    const bool is_call = UnitRegion::of(region) != nullptr;
    ends = is_call && !begins;
    return !is_call;
  });
  return ends;
}

// --- the pass ---

void Context::schedule_end() {
  if (in_pass_) return;
  auto pass = std::make_shared<Pass>();
  pass->context = shared_from_this();
  autograd::at_end_of_backward([this, pass] {
    end_of_root_backward();
    in_pass_ = false;
  });
  ++pass_;
  in_pass_ = true;
}

// Not only at the end of a pass: where one rank goes back along two forwards in one, another may
// skip either in a pass of its own. What is written to a unit outside of its calls, as to one that
// stays open, is reduced here, and a round of which this pass has not come to the first call. A
// unit whose call goes on stays open, and is reduced on all ranks, whichever have used it.
void Context::end_of_root_backward() {
  for (const auto& weak : units_) {
    const std::shared_ptr<Unit> unit = weak.lock();
    if (!unit) continue;
    if (unit->owes_reduction()) unit->reduce();
    if (unit->control().reshards_after_backward() && !unit->calls().is_running()) unit->close();
  }
}

}  // namespace tessera::shard
