// State of modules by name, sharded or whole: the calls of nn::Module that may communicate.
#include <algorithm>
#include <memory>

#include "runtime/distributed/gatherer.hpp"
#include "tessera/comm/group.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/distributed/state.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::nn {

namespace {

// Of what has memory and lies in no unit.
std::vector<std::pair<std::string, Tensor>> unsharded(const Module& module) {
  std::vector<std::pair<std::string, Tensor>> all;
  for (const auto& [name, p] : module.named_parameters())
    if (!p.mesh() && !p.device().is_meta()) all.emplace_back(name, p.shard());
  return all;
}

}  // namespace

StateDict Module::state_dict(const StateDictOptions& options) const {
  if (options.form == StateForm::full && options.ranks == StateRanks::rank_0)
    for (const Parameter& p : parameters())
      if (const auto mesh = p.mesh()) {
        expect_same_values("state_dict", {&mesh->shard_group()}, unsharded(*this));
        break;
      }
  StateDict views;
  for (const auto& [name, p] : named_parameters())
    views.emplace(name, StateTensor(p.shard(), p.spec(), p.mesh(), updates_of(p)));
  for (const auto& [name, b] : named_buffers(Persistent::yes)) views.emplace(name, b.value());
  return make_state_dict(views, options);
}

LoadReport load(Module& model, const std::function<std::shared_ptr<const StateSource>()>& source,
                const LoadOptions& options) {
  StateHolder holder = state_holder(model);
  const auto has_memory = [](const Parameter& p) { return !p.device().is_meta(); };
  if (options.from_rank_0) expect_same_values("load", {options.from_rank_0}, unsharded(model));
  if (options.from_rank_0 && std::ranges::none_of(model.parameters(), has_memory))
    holder.materialize = [&model](const Device& device) { model.materialize(device); };
  return load_state(state_targets(model), source, holder, options);
}

LoadReport load(Module& model, const StateSource& source, const LoadOptions& options) {
  std::shared_ptr<const StateSource> here(std::shared_ptr<void>(), &source);  // not owned
  return nn::load(model, [&] { return here; }, options);
}

LoadReport Module::load(const StateSource& source, const LoadOptions& options) {
  return nn::load(*this, source, options);
}

LoadReport Module::load(const StateDict& state, const LoadOptions& options) {
  return nn::load(*this, [&] { return std::make_shared<DictSource>(state); }, options);
}

}  // namespace tessera::nn
