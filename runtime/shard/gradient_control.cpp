// What a program may change of how its units reduce.
#include <cmath>
#include <vector>

#include "runtime/shard/unit.hpp"
#include "tessera/shard/runtime_control.hpp"

namespace tessera {
namespace {

std::vector<shard::Unit*> units_of(const char* function, nn::Module& module, bool recurse) {
  std::vector<shard::Unit*> units;
  for (const auto& [name, below] : module.named_modules())
    if (auto* const unit = dynamic_cast<shard::Unit*>(below->hook().get());
        unit && (recurse || below == &module))
      units.push_back(unit);
  TESSERA_EXPECT(!units.empty(), function, ": the module is no unit",
                 recurse ? " and has none below it" : "", "; call fully_shard first");
  for (const shard::Unit* const unit : units)
    TESSERA_EXPECT(!autograd::in_backward() && !autograd::in_call() && !unit->is_in_call(),
                   function, ": unit '", unit->name(),
                   "' is in a call or in backward; call it between them");
  return units;
}

}  // namespace

void set_requires_gradient_sync(nn::Module& module, bool requires_gradient_sync, bool recurse) {
  for (shard::Unit* const unit : units_of("set_requires_gradient_sync", module, recurse))
    unit->set_reduces(requires_gradient_sync);
}

void set_requires_all_reduce(nn::Module& module, bool requires_all_reduce, bool recurse) {
  for (shard::Unit* const unit : units_of("set_requires_all_reduce", module, recurse))
    unit->set_all_reduces(requires_all_reduce);
}

void set_gradient_divide_factor(nn::Module& module, double factor) {
  TESSERA_EXPECT(std::isfinite(factor) && factor > 0, "set_gradient_divide_factor: factor is ",
                 factor, "; expected a finite number above 0");
  for (shard::Unit* const unit : units_of("set_gradient_divide_factor", module, false))
    unit->set_divide_factor(factor);
}

}  // namespace tessera
