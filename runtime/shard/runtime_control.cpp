// What a program decides about its units while it runs.
#include "tessera/shard/runtime_control.hpp"

#include <cmath>
#include <utility>

#include "runtime/shard/streamed_parameter.hpp"
#include "runtime/shard/unit.hpp"
#include "runtime/shard/unit_region.hpp"
#include "tessera/detail/device/captured_work.hpp"

namespace tessera {
namespace {

using shard::Unit;
using shard::UnitShards;

std::shared_ptr<Unit> unit_of(const char* function, nn::Module& module) {
  auto unit = std::dynamic_pointer_cast<Unit>(module.hook());
  TESSERA_EXPECT(unit != nullptr, function, ": ", shard::called(module),
                 " is not a unit; call fully_shard on it first");
  return unit;
}

// Of a unit with memory.
std::shared_ptr<Unit> unit_outside_of_backward(const char* function, nn::Module& module) {
  auto unit = unit_of(function, module);
  TESSERA_EXPECT(!autograd::in_backward(), function, ": a backward pass of unit '", unit->name(),
                 "' is running; call ", function,
                 " outside of backward and of recomputed functions");
  TESSERA_EXPECT(unit->shards().is_materialized() || unit->shards().is_empty(), function,
                 ": unit '", unit->name(),
                 "' has no memory yet; call materialize on the model first");
  return unit;
}

void expect_between_steps(const char* function, Unit& unit) {
  TESSERA_EXPECT(!autograd::in_backward() && !autograd::in_call() && !unit.calls().is_running(),
                 function, ": a call or a backward pass of unit '", unit.name(),
                 "' is running; call ", function, " between steps");
  ++decisions().count;
}

// With `recurse` also those below. Throws: ContractError where there is none, and inside of a call.
void for_each_unit(const char* function, nn::Module& module, bool recurse,
                   const std::function<void(Unit&)>& f) {
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto& [name, below] : module.named_modules())
    if (auto unit = std::dynamic_pointer_cast<Unit>(below->hook());
        unit && (recurse || below == &module) &&
        std::find(units.begin(), units.end(), unit) == units.end())
      units.push_back(std::move(unit));
  TESSERA_EXPECT(!units.empty(), function, ": ", shard::called(module), " is not a unit",
                 recurse ? ", nor is one below it" : "", "; call fully_shard on it first");
  for (const auto& unit : units) expect_between_steps(function, *unit);
  for (const auto& unit : units) f(*unit);
}

// As it, and the slices of what it streams.
void with_slices(Unit& unit, const std::function<void(Unit&)>& f) {
  f(unit);
  for (const auto& p : unit.shards().streamed())
    for (int i = 0; p->slices && i < p->slices->count(); ++i) f(*shard::slices_of(*p)->unit(i));
}

// As it, and its slices where they may wait.
void with_waiting(Unit& unit, const std::function<void(Unit&)>& f) {
  unit.shards().options().slices_wait ? with_slices(unit, f) : f(unit);
}

void set_prefetch(const char* function, Unit::Prefetch where, nn::Module& module,
                  const std::vector<nn::Module*>& modules) {
  const std::shared_ptr<Unit> unit = unit_of(function, module);
  expect_between_steps(function, *unit);
  Unit::PrefetchList list;
  for (nn::Module* const listed : modules) {
    const auto of = std::dynamic_pointer_cast<Unit>(listed ? listed->hook() : nullptr);
    TESSERA_EXPECT(of != nullptr, function, ": module ", list.size(), " of the list for unit '",
                   unit->name(), "' is not a unit; call fully_shard on it first");
    TESSERA_EXPECT(of->root() == unit->root(), function, ": unit '", of->name(),
                   "' has another root than unit '", unit->name(), "'; list units under one root");
    list.push_back(of);
  }
  unit->set_prefetch(where, std::move(list));
  if (unit->root()) unit->check_prefetch_lists(*unit->root());
}

}  // namespace

void unshard(nn::Module& module) {
  const std::shared_ptr<Unit> unit = unit_outside_of_backward("unshard", module);
  if (!unit->root()) {
    TESSERA_EXPECT(!unit->is_inner(), "unshard: unit '", unit->name(),
                   "' lies inside another unit, and its root has not run yet, or not since a step "
                   "failed; call the root first, or shard_plan with it");
    shard::Root::build(module);
  }
  unit->root()->expect_valid(unit->name());
  unit->root()->expect_open_units();
  unit->root()->close_stale_units();
  unit->gather();
  unit->open();
  if (!autograd::history_is_wanted()) return;
  unit->may_be_used();
  if (!autograd::in_call()) unit->root()->backward().note_opened();
}

void reshard(nn::Module& module) {
  const std::shared_ptr<Unit> unit = unit_outside_of_backward("reshard", module);
  TESSERA_EXPECT(!unit->calls().is_running(), "reshard: a call of unit '", unit->name(),
                 "' is running; reshard it when that has ended");
  with_slices(*unit, [](Unit& part) { part.close(); });
}

void set_reshard_after_forward(nn::Module& module, Reshard when, bool recurse) {
  constexpr const char* kFunction = "set_reshard_after_forward";
  for_each_unit(kFunction, module, recurse, [when](Unit& unit) {
    shard::check_reshard(kFunction, concat("unit '", unit.name(), "'"), when,
                         unit.shards().options().mesh, unit.shards().parameters());
    with_slices(unit, [when](Unit& part) {
      part.set_reshard_after_forward(when);
      if (part.root()) part.set_neighbours(part.root()->neighbours(when));
    });
    if (unit.root()) unit.check_prefetch_lists(*unit.root());
  });
}

void set_reshard_after_backward(nn::Module& module, bool reshards, bool recurse) {
  for_each_unit("set_reshard_after_backward", module, recurse, [reshards](Unit& unit) {
    with_slices(unit, [reshards](Unit& part) { part.set_reshard_after_backward(reshards); });
    if (unit.root()) unit.check_prefetch_lists(*unit.root());
  });
}

void set_unshard_in_backward(nn::Module& module, bool unshards) {
  for_each_unit("set_unshard_in_backward", module, false, [unshards](Unit& unit) {
    const UnitShards& shards = unit.shards();
    for (const auto& p : shards.streamed())
      TESSERA_EXPECT(!shards.parameters().empty() || shard::backward_reads_slices(*p) == unshards,
                     "set_unshard_in_backward: unit '", unit.name(), "' only streams '", p->name,
                     "', and its module says that backward gathers ",
                     unshards ? "no slices" : "the slices that it reads", "; leave the call out");
    unit.set_unshard_in_backward(unshards);
    if (unit.root())
      unit.set_neighbours(unit.root()->neighbours(unit.shards().options().reshard_after_forward));
  });
}

void set_modules_to_forward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules) {
  set_prefetch("set_modules_to_forward_prefetch", Unit::Prefetch::forward, module, modules);
}

void set_modules_to_backward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules) {
  set_prefetch("set_modules_to_backward_prefetch", Unit::Prefetch::backward, module, modules);
}

// --- gradients ---

// In the place of a backward that this rank leaves out while its peers run it.
void skip_backward(nn::Module& module) {
  const auto* const unit = dynamic_cast<shard::Unit*>(module.hook().get());
  TESSERA_EXPECT(
      unit && (!unit->root() || unit->shards().is_root()),
      "skip_backward: the module is no root; give the module of the outermost fully_shard");
  autograd::skip_backward([&](autograd::Region& region) {
    const auto* const call = shard::UnitRegion::of(region);
    const auto called = call ? call->unit() : nullptr;
    return called && called->root() == unit->root();
  });
}

void skip_backward(const Tensor& loss, bool retain_graph) {
  autograd::skip_backward(loss, retain_graph);
}

void set_requires_gradient_sync(nn::Module& module, bool requires_gradient_sync, bool recurse) {
  for_each_unit("set_requires_gradient_sync", module, recurse, [=](Unit& unit) {
    with_waiting(unit, [=](Unit& part) { part.set_reduces(requires_gradient_sync); });
  });
}

void set_requires_all_reduce(nn::Module& module, bool requires_all_reduce, bool recurse) {
  for_each_unit("set_requires_all_reduce", module, recurse, [=](Unit& unit) {
    with_waiting(unit, [=](Unit& part) { part.set_all_reduces(requires_all_reduce); });
  });
}

void set_gradient_divide_factor(nn::Module& module, double factor) {
  // A gradient is multiplied by its inverse in f32.
  TESSERA_EXPECT(factor > 0 && std::isnormal(static_cast<float>(1 / factor)),
                 "set_gradient_divide_factor: ", shard::called(module), ": factor is ", factor,
                 "; expected a finite number above 0, whose inverse f32 holds");
  for_each_unit("set_gradient_divide_factor", module, false, [=](Unit& unit) {
    with_slices(unit, [=](Unit& part) { part.set_divide_factor(factor); });
  });
}

void set_reductions_in_flight(nn::Module& module, int reductions, bool recurse) {
  TESSERA_EXPECT(reductions >= 1 && reductions <= 64,
                 "set_reductions_in_flight: ", shard::called(module), ": reductions is ",
                 reductions, "; expected 1 to 64");
  for_each_unit("set_reductions_in_flight", module, recurse, [=](Unit& unit) {
    with_slices(unit, [=](Unit& part) { part.set_reductions_in_flight(reductions); });
  });
}

void set_all_reduce_hook(nn::Module& module, AllReduceHook hook, std::optional<StreamId> stream) {
  const std::string of = shard::called(module);
  TESSERA_EXPECT(hook || !stream, "set_all_reduce_hook: ", of, ": stream '", name(*stream),
                 "' is given without a hook; give both, or none");
  TESSERA_EXPECT(!stream || (*stream != StreamId::transfer && *stream != StreamId::offload),
                 "set_all_reduce_hook: ", of, ": stream '", name(*stream),
                 "' has no kernels of the device; give compute, gather, reduce or replicate");
  for_each_unit("set_all_reduce_hook", module, false, [&](Unit& unit) {
    const UnitShards& shards = unit.shards();
    TESSERA_EXPECT(
        !hook || shards.has_buffer(), "set_all_reduce_hook: unit '", unit.name(),
        "' is on one rank, where nothing is reduced; set a hook on a mesh of several ranks");
    TESSERA_EXPECT(
        !stream || shards.options().mesh.replicas() == 1, "set_all_reduce_hook: unit '",
        unit.name(),
        "' has replicas, so the hook runs on the stream that sums over them; give no stream");
    with_slices(unit, [&](Unit& part) { part.set_all_reduce_hook(hook, stream); });
  });
}

}  // namespace tessera
