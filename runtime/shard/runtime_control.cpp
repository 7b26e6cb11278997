// What a program decides about its units while it runs.
#include "tessera/shard/runtime_control.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/shard/streamed_parameter.hpp"
#include "runtime/shard/unit.hpp"
#include "tessera/device/captured_work.hpp"

namespace tessera::shard {

void UnitControl::check(Context& context) const {
  if (!reshards_after_backward_) context.expect_open_units();
  for (const PrefetchList& list : prefetch_)
    for (const auto& weak : list)
      if (const std::shared_ptr<Unit> unit = weak.lock()) {
        context.expect_open_units();
        TESSERA_EXPECT(unit->context().get() == &context, "prefetch: unit '", unit->name(),
                       "' is in a list of unit '", shards_.name,
                       "' and has another root; list units under one root");
      }
}

void UnitControl::name_decisions() {
  std::string said;
  const auto say = [&](const std::string& what) { said += (said.empty() ? "" : ", ") + what; };
  if (const Reshard now = shards_.options.reshard_after_forward; now != reshard_)
    say("reshard " + now.to_string());
  if (!reshards_after_backward_) say("open after backward");
  if (is_read_ != may_be_read_) say(is_read_ ? "read in backward" : "not read in backward");
  if (shards_.divide_factor != shards_.ranks())
    say(concat("gradients divided by ", shards_.divide_factor));
  if (!shards_.reduces)
    say("set_requires_gradient_sync(false)");
  else if (!shards_.all_reduces)
    say("set_requires_all_reduce(false)");
  for (const bool is_forward : {true, false}) {
    std::string list;
    for (const auto& weak : prefetch_list(is_forward ? Prefetch::forward : Prefetch::backward))
      if (const std::shared_ptr<Unit> unit = weak.lock()) list += ' ' + unit->name();
    if (!list.empty()) say((is_forward ? "prefetches" : "prefetches in backward") + list);
  }
  if (!said.empty()) said = " (" + said + ')';
  if (std::exchange(shards_.decisions, said) != said) shards_.set_name(shards_.name);
}

void Unit::gather_listed(UnitControl::Prefetch where) {
  for (const auto& weak : control_.prefetch_list(where))
    if (const std::shared_ptr<Unit> unit = weak.lock()) unit->gather();
}

void Context::close_stale_units() {
  for (const auto& weak : units_)
    if (const auto unit = weak.lock(); unit && unit->is_stale() && !unit->calls().is_running())
      unit->close();
}

void Slots::set_reductions_in_flight(int unit, int reductions) {
  was_set_ = true;
  if (to_be_agreed_ < 0) to_be_agreed_ = unit;
  int& known = units_[static_cast<std::size_t>(unit)].reductions_in_flight;
  if (std::exchange(known, reductions) != reductions) are_plans_old_ = true;
}

void Slots::plan_anew() {
  are_plans_old_ = false;
  for (auto& [step, kept] : kept_) kept.plan = plan_slots(kept.uses, units_);
  const std::uint64_t step = std::exchange(followed_, 0);
  if (kept_.contains(step)) follow(step);
  least_bytes_ = 0;
  wants_resize_ = true;
}

// What the program does with sums that are there when `last` is. Returns where it does. Tensors'
// own operations run on compute, which nothing here orders with another stream.
Stream GradientPiece::run_hook(Stream last, const Parts& sums) const {
  const Stream stream = shards_.hook_stream ? shards_.device.stream(*shards_.hook_stream) : last,
               compute = shards_.device.compute();
  if (stream.id() != last.id()) stream.wait(last.record());
  const Tick before = stream.clock()[stream.id()], computed = compute.clock()[compute.id()];
  shards_.hook({values_of(sums), counts_of(sums), stream});
  const Tick now = compute.clock()[compute.id()];
  TESSERA_EXPECT(
      now == computed || stream.id() == compute.id() ||
          (compute.clock()[stream.id()] >= before && stream.clock()[compute.id()] >= now),
      "unit '", shards_.name,
      "': its all-reduce hook has queued operations on compute, such as "
      "tensors' own, while the gradients are on ",
      name(stream.id()),
      shards_.replicas ? "; " : "; give set_all_reduce_hook StreamId::compute, or ",
      "let compute wait for g.stream.record() before them, and g.stream for compute's behind");
  return stream;
}

}  // namespace tessera::shard

namespace tessera {
namespace {

using shard::Unit;
using shard::UnitControl;
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
                 "' is running; call it outside of backward and of recomputed functions");
  TESSERA_EXPECT(unit->shards().is_materialized() || unit->shards().is_empty(), function,
                 ": unit '", unit->name(),
                 "' has no memory yet; call materialize on the model first");
  return unit;
}

void expect_between_steps(const char* function, Unit& unit) {
  TESSERA_EXPECT(!autograd::in_backward() && !autograd::in_call() && !unit.calls().is_running(),
                 function, ": a call or a backward pass of unit '", unit.name(),
                 "' is running; do it between steps");
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
  for (const auto& p : unit.shards().streamed)
    for (int i = 0; p->slices && i < p->slices->count(); ++i) f(*shard::slices_of(*p)->unit(i));
}

// As it, and its slices where they may wait.
void with_waiting(Unit& unit, const std::function<void(Unit&)>& f) {
  unit.shards().options.slices_wait ? with_slices(unit, f) : f(unit);
}

void set_prefetch(const char* function, UnitControl::Prefetch where, nn::Module& module,
                  const std::vector<nn::Module*>& modules) {
  const std::shared_ptr<Unit> unit = unit_of(function, module);
  expect_between_steps(function, *unit);
  UnitControl::PrefetchList list;
  for (nn::Module* const listed : modules) {
    const auto of = std::dynamic_pointer_cast<Unit>(listed ? listed->hook() : nullptr);
    TESSERA_EXPECT(of != nullptr, function, ": module ", list.size(), " of the list for unit '",
                   unit->name(), "' is not a unit; call fully_shard on it first");
    TESSERA_EXPECT(of->context() == unit->context(), function, ": unit '", of->name(),
                   "' has another root than unit '", unit->name(), "'; list units under one root");
    list.push_back(of);
  }
  unit->control().set_prefetch(where, std::move(list));
  if (unit->context()) unit->control().check(*unit->context());
}

}  // namespace

void unshard(nn::Module& module) {
  const std::shared_ptr<Unit> unit = unit_outside_of_backward("unshard", module);
  if (!unit->context()) {
    TESSERA_EXPECT(!unit->control().is_inner(), "unshard: unit '", unit->name(),
                   "' lies inside of another one, whose root has not run yet, or not since a step "
                   "failed; call shard_plan with the root, or the root itself, first");
    shard::Context::build(module);
  }
  unit->context()->expect_valid(unit->name());
  unit->context()->expect_open_units();
  unit->context()->close_stale_units();
  unit->gather();
  unit->open();
  unit->may_be_used();
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
                         unit.shards().options.mesh, unit.shards().parameters);
    with_slices(unit, [when](Unit& part) {
      part.control().set_reshard_after_forward(when);
      if (part.context()) part.set_neighbours(part.context()->neighbours(when));
    });
  });
}

void set_reshard_after_backward(nn::Module& module, bool reshards, bool recurse) {
  for_each_unit("set_reshard_after_backward", module, recurse, [reshards](Unit& unit) {
    with_slices(unit,
                [reshards](Unit& part) { part.control().set_reshard_after_backward(reshards); });
    if (unit.context()) unit.control().check(*unit.context());
  });
}

void set_unshard_in_backward(nn::Module& module, bool unshards) {
  for_each_unit("set_unshard_in_backward", module, false, [unshards](Unit& unit) {
    const UnitShards& shards = unit.shards();
    for (const auto& p : shards.streamed)
      TESSERA_EXPECT(!shards.parameters.empty() || shard::backward_reads_slices(*p) == unshards,
                     "set_unshard_in_backward: unit '", unit.name(), "' streams '", p->name,
                     "' alone, of which backward gathers ",
                     unshards ? "no slices" : "the slices that it reads",
                     ", as its module says; leave the call out");
    unit.control().set_unshard_in_backward(unshards);
    if (unit.context())
      unit.set_neighbours(unit.context()->neighbours(unit.shards().options.reshard_after_forward));
  });
}

void set_modules_to_forward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules) {
  set_prefetch("set_modules_to_forward_prefetch", UnitControl::Prefetch::forward, module, modules);
}

void set_modules_to_backward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules) {
  set_prefetch("set_modules_to_backward_prefetch", UnitControl::Prefetch::backward, module,
               modules);
}

// --- gradients ---

void set_requires_gradient_sync(nn::Module& module, bool requires_gradient_sync, bool recurse) {
  for_each_unit("set_requires_gradient_sync", module, recurse, [=](Unit& unit) {
    with_waiting(unit, [=](Unit& part) { part.control().set_reduces(requires_gradient_sync); });
  });
}

void set_requires_all_reduce(nn::Module& module, bool requires_all_reduce, bool recurse) {
  for_each_unit("set_requires_all_reduce", module, recurse, [=](Unit& unit) {
    with_waiting(unit, [=](Unit& part) { part.control().set_all_reduces(requires_all_reduce); });
  });
}

void set_gradient_divide_factor(nn::Module& module, double factor) {
  // A gradient is multiplied by its inverse in f32.
  TESSERA_EXPECT(factor > 0 && std::isnormal(static_cast<float>(1 / factor)),
                 "set_gradient_divide_factor: ", shard::called(module), ": factor is ", factor,
                 "; expected a finite number above 0, whose inverse f32 holds");
  for_each_unit("set_gradient_divide_factor", module, false, [=](Unit& unit) {
    with_slices(unit, [=](Unit& part) { part.control().set_divide_factor(factor); });
  });
}

void set_reductions_in_flight(nn::Module& module, int reductions, bool recurse) {
  TESSERA_EXPECT(reductions >= 1 && reductions <= 64,
                 "set_reductions_in_flight: ", shard::called(module), ": reductions is ",
                 reductions, "; expected 1 to 64");
  for_each_unit("set_reductions_in_flight", module, recurse, [=](Unit& unit) {
    with_slices(unit, [=](Unit& part) { part.control().set_reductions_in_flight(reductions); });
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
    TESSERA_EXPECT(!hook || shards.has_buffer(), "set_all_reduce_hook: unit '", unit.name(),
                   "' is on one rank, where nothing is reduced; call it for a mesh of several");
    TESSERA_EXPECT(!stream || shards.options.mesh.replicas() == 1, "set_all_reduce_hook: unit '",
                   unit.name(),
                   "' has replicas, whose sums run on a stream of the mesh, and the "
                   "hook behind them; give no stream");
    with_slices(unit, [&](Unit& part) { part.control().set_all_reduce_hook(hook, stream); });
  });
}

}  // namespace tessera
