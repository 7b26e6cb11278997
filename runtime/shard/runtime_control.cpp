// What a program decides about its units while it runs; all that units do for it.
#include "tessera/shard/runtime_control.hpp"

#include <algorithm>
#include <cmath>

#include "runtime/shard/streamed_parameter.hpp"
#include "runtime/shard/unit.hpp"

namespace tessera::shard {

// --- outside of calls ---

void Unit::unshard() {
  expect_valid();
  context_->expect_open_units();
  context_->close_stale_units();
  gather();
  open();
}

void Unit::reshard() {
  TESSERA_EXPECT(!is_in_call(), "reshard: a call of unit '", name(),
                 "' is running; reshard it when that has ended");
  close();
}

// --- how long it stays open ---

void Unit::expect_between_steps(const char* function) const {
  TESSERA_EXPECT(!autograd::in_backward() && !autograd::in_call() && !is_in_call(), function,
                 ": a call or a backward pass of unit '", name(),
                 "' is running; do it between steps");
}

void Unit::set_reshard_after_forward(Reshard when) {
  shards_.options.reshard_after_forward = when;
  keeps_open_ = when == Reshard::never || (is_root_ && when == Reshard::automatic);
  if (shards_.slots) {
    shards_.slots->set_keeps_open(shards_.number, keeps_open_);
    set_neighbours(context_->neighbours(when));
  }
  for_each_slice([when](Unit& slice) { slice.set_reshard_after_forward(when); });
}

void Unit::set_reshard_after_backward(bool reshards) {
  reshards_after_backward_ = reshards;
  if (context_) check_control();
  for_each_slice([reshards](Unit& slice) { slice.set_reshard_after_backward(reshards); });
}

void Unit::set_divide_factor(double factor) {
  shards_.divide_factor = factor;
  if (local_) local_->divide_factor = factor;
  for_each_slice([factor](Unit& slice) { slice.set_divide_factor(factor); });
}

void Unit::for_each_slice(const std::function<void(Unit&)>& f) const {
  for (const auto& p : shards_.streamed)
    for (int i = 0; p->slices && i < p->slices->count(); ++i)
      f(*std::static_pointer_cast<StreamedParameter>(p->slices)->unit(i));
}

// --- which gathers run ahead ---

void Unit::set_prefetch(Prefetch where, PrefetchList units) {
  prefetch_[static_cast<std::size_t>(where)] = std::move(units);
  if (context_) check_control();
}

void Unit::check_control() const {
  if (!reshards_after_backward_) context_->expect_open_units();
  for (const PrefetchList& list : prefetch_)
    for (const auto& weak : list)
      if (const std::shared_ptr<Unit> unit = weak.lock()) {
        context_->expect_open_units();
        TESSERA_EXPECT(unit->context() == context_, "prefetch: unit '", unit->name(),
                       "' is in a list of unit '", name(),
                       "' and has another root; list units under one root");
      }
}

void Unit::gather_listed(Prefetch where) {
  for (const auto& weak : prefetch_list(where))
    if (const std::shared_ptr<Unit> unit = weak.lock()) unit->gather();
}

}  // namespace tessera::shard

namespace tessera {
namespace {

using shard::Unit;

std::shared_ptr<Unit> unit_of(const char* function, nn::Module& module) {
  auto unit = std::dynamic_pointer_cast<Unit>(module.hook());
  TESSERA_EXPECT(unit != nullptr, function,
                 ": the module is not a unit; call fully_shard on it first");
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

// With `recurse` also those below. Throws: ContractError where there is none, and inside of a call.
void for_each_unit(const char* function, nn::Module& module, bool recurse,
                   const std::function<void(Unit&)>& f) {
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto& [name, below] : module.named_modules())
    if (auto unit = std::dynamic_pointer_cast<Unit>(below->hook());
        unit && (recurse || below == &module) &&
        std::find(units.begin(), units.end(), unit) == units.end())
      units.push_back(std::move(unit));
  TESSERA_EXPECT(!units.empty(), function, ": the module is not a unit",
                 recurse ? ", nor is one below it" : "", "; call fully_shard on it first");
  for (const auto& unit : units) unit->expect_between_steps(function);
  for (const auto& unit : units) f(*unit);
}

void set_prefetch(const char* function, Unit::Prefetch where, nn::Module& module,
                  const std::vector<nn::Module*>& modules) {
  const std::shared_ptr<Unit> unit = unit_of(function, module);
  unit->expect_between_steps(function);
  Unit::PrefetchList list;
  for (nn::Module* const listed : modules) {
    const auto of = std::dynamic_pointer_cast<Unit>(listed ? listed->hook() : nullptr);
    TESSERA_EXPECT(of != nullptr, function, ": module ", list.size(), " of the list for unit '",
                   unit->name(), "' is not a unit; call fully_shard on it first");
    TESSERA_EXPECT(of->context() == unit->context(), function, ": unit '", of->name(),
                   "' has another root than unit '", unit->name(), "'; list units under one root");
    list.push_back(of);
  }
  unit->set_prefetch(where, std::move(list));
}

}  // namespace

void unshard(nn::Module& module) {
  const std::shared_ptr<Unit> unit = unit_outside_of_backward("unshard", module);
  if (!unit->context()) {
    TESSERA_EXPECT(!unit->is_inner(), "unshard: unit '", unit->name(),
                   "' lies inside of another one, whose root has not run yet; call shard_plan with "
                   "the root, or the root itself, first");
    shard::Context::build(module);
  }
  unit->unshard();
}

void reshard(nn::Module& module) { unit_outside_of_backward("reshard", module)->reshard(); }

void set_reshard_after_forward(nn::Module& module, Reshard when, bool recurse) {
  constexpr const char* kFunction = "set_reshard_after_forward";
  for_each_unit(kFunction, module, recurse, [when](Unit& unit) {
    shard::check_reshard(kFunction, when, unit.shards().options.mesh);
    unit.set_reshard_after_forward(when);
  });
}

void set_reshard_after_backward(nn::Module& module, bool reshards, bool recurse) {
  for_each_unit("set_reshard_after_backward", module, recurse,
                [reshards](Unit& unit) { unit.set_reshard_after_backward(reshards); });
}

void set_unshard_in_backward(nn::Module& module, bool unshards) {
  for_each_unit("set_unshard_in_backward", module, false,
                [unshards](Unit& unit) { unit.set_unshard_in_backward(unshards); });
}

void set_modules_to_forward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules) {
  set_prefetch("set_modules_to_forward_prefetch", Unit::Prefetch::forward, module, modules);
}

void set_modules_to_backward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules) {
  set_prefetch("set_modules_to_backward_prefetch", Unit::Prefetch::backward, module, modules);
}

// --- gradients ---

void set_requires_gradient_sync(nn::Module& module, bool requires_gradient_sync, bool recurse) {
  for_each_unit("set_requires_gradient_sync", module, recurse,
                [=](Unit& unit) { unit.set_reduces(requires_gradient_sync); });
}

void set_requires_all_reduce(nn::Module& module, bool requires_all_reduce, bool recurse) {
  for_each_unit("set_requires_all_reduce", module, recurse,
                [=](Unit& unit) { unit.set_all_reduces(requires_all_reduce); });
}

void set_gradient_divide_factor(nn::Module& module, double factor) {
  TESSERA_EXPECT(std::isfinite(factor) && factor > 0, "set_gradient_divide_factor: factor is ",
                 factor, "; expected a finite number above 0");
  for_each_unit("set_gradient_divide_factor", module, false,
                [=](Unit& unit) { unit.set_divide_factor(factor); });
}

}  // namespace tessera
