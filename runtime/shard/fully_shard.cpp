#include "tessera/shard/fully_shard.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "runtime/shard/unit.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

namespace shard {

std::string called(const nn::Module& module) {
  const auto parameters = module.named_parameters();
  return parameters.empty() ? "the module without parameters"
                            : concat("the module of '", parameters.front().second.name(), "'");
}

void make_unit(const std::vector<nn::Module*>& modules, const ShardOptions& options) {
  const std::string of = called(*modules.front());
  check_options(options, of);
  std::vector<std::shared_ptr<ParameterState>> claimed;
  std::vector<int> dims;  // along which they are sharded
  std::vector<Unit*> inside;
  for (nn::Module* const module : modules)
    for (const auto& [name, below] : module->named_modules())
      if (auto* const unit = dynamic_cast<Unit*>(below->hook().get())) inside.push_back(unit);
  const auto is_inside = [&](const std::string* unit) {
    return std::ranges::any_of(inside, [&](const Unit* inner) { return &inner->name() == unit; });
  };
  std::unordered_set<const ParameterState*> ignored, known;  // two modules may share one
  for (const Parameter& p : options.ignored) ignored.insert(state_of(p).get());
  bool is_read = false;  // in backward
  for (const nn::Module* const module : modules) {
    std::size_t claims = 0, own = 0;
    for (const auto& [name, parameter] : module->own_parameters())
      own += ignored.contains(state_of(parameter).get()) ? 0 : 1;
    for (const auto& [name, parameter] : module->named_parameters()) {
      const auto& state = state_of(parameter);
      if (ignored.contains(state.get())) continue;
      TESSERA_EXPECT(!state->is_ignored, "fully_shard: parameter '", name,
                     "' is ignored by a unit inside of ", of,
                     "; give this unit the same ShardOptions::ignored");
      if (state->unit) {
        TESSERA_EXPECT(
            is_inside(state->unit), "fully_shard: parameter '", name, "' belongs to unit '",
            *state->unit,
            "' already; shard inner modules before those around them, and the module that holds "
            "both where two share a parameter, or a list of the two");
        continue;
      }
      ++claims;
      if (!known.insert(state.get()).second) continue;
      claimed.push_back(state);
      dims.push_back(dim_of(parameter, options, of));
    }
    // A module below this one may be called again inside of this one's call.
    is_read = is_read || module->reads_parameters_in_backward() || claims > own;
  }
  check_claimed(claimed, options, of);  // before anything has changed
  // Values that exist move from their whole arrays into the shards.
  std::vector<std::pair<std::shared_ptr<ParameterState>, Tensor>> held;
  Device device = Device::meta();
  for (const nn::Module* const module : modules)
    for (const Parameter& p : module->parameters())  // also of what inner units have
      if (!p.device().is_meta()) device = p.device().main();
  for (const auto& state : claimed) {
    if (!state->group) continue;
    ++state->group->layouts;  // for optimizers
    held.emplace_back(state, state->rows());
    state->group = nullptr;
  }
  std::vector<const nn::Module*> list;
  if (modules.size() > 1) list.assign(modules.begin(), modules.end());
  ShardOptions kept = options;
  kept.ignored.clear(), kept.shard_placement_fn = {};  // a unit holds nothing of others
  for (std::size_t i = 0; i < claimed.size(); ++i) claimed[i]->spec.dim = dims[i];
  auto unit = std::make_shared<Unit>(claimed, kept, is_read, std::move(list));
  for (const Parameter& p : options.ignored) state_of(p)->is_ignored = true;
  for (nn::Module* const module : modules) module->set_hook(unit);
  note_made(unit, modules);
  for (Unit* const inner : inside) inner->control().set_inner();
  if (device.is_meta() || held.size() < claimed.size()) return;
  unit->materialize(device);
  for (const auto& [state, values] : held) {
    if (const Tensor rows = state->rows(); rows.numel() > 0)
      raw::copy_into(rows, rows_of(values, state->spec));
    state->group->mark_edited();
  }
}

}  // namespace shard

void fully_shard(nn::Module& module, const ShardOptions& options, Caller at) {
  const CallSite site(at);
  TESSERA_EXPECT(module.hook() == nullptr, "fully_shard: ", shard::called(module),
                 " is a unit already; call it once on each module");
  shard::make_unit({&module}, options);
}

}  // namespace tessera
