#include "runtime/shard/unit_shards.hpp"

#include <algorithm>

#include "tessera/base/log.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {

UnitShards::UnitShards(std::vector<std::shared_ptr<ParameterState>> claimed,
                       const ShardOptions& options)
    : options(options), parameters(std::move(claimed)) {
  std::vector<ShardSpec> specs;
  std::vector<bool> is_trainable;
  for (const auto& p : parameters) {
    p->unit = &name;
    p->spec = {p->shape, options.mesh.shard_size(), options.mesh.shard_rank()};
    p->compute_dtype = param_dtype();
    specs.push_back(p->spec);
    is_trainable.push_back(p->trainable);
  }
  layout = UnitLayout::make(specs, is_trainable, param_dtype(), reduce_dtype());
}

void UnitShards::materialize(const Device& on) {
  TESSERA_EXPECT(!is_materialized(), "materialize: unit '", name, "' already has memory");
  device = on;
  for (const bool is_trainable : {true, false}) {
    std::vector<std::shared_ptr<ParameterState>> states;
    std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(states),
                 [&](const auto& p) { return p->trainable == is_trainable; });
    if (states.empty()) continue;
    auto& group = is_trainable ? trainable : frozen;
    group = FlatGroup::make(name, states, device);
    const World& world = options.mesh.world();
    if (size() > 1) group->sums = {world.share(), &world.control()};
  }
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i]->trainable) parameter_of.push_back(i);  // entries lie in this order
}

void UnitShards::set_name(std::string to) {
  name = std::move(to);
  DeviceContext& context = options.mesh.world().device().context();
  gather_name = context.intern("all_gather " + name);
  reduce_name = context.intern("reduce_scatter " + name);
  for (const auto& group : {trainable, frozen})
    if (group) group->name = name;
}

void UnitShards::give_back(const Slot& slot) const noexcept {
  try {
    slots->give_back(slot);
  } catch (const std::exception& error) {
    log(LogLevel::error, concat("unit '", name, "': could not give its slot back: ", error.what()));
  }
}

Tensor table_of(const std::vector<std::int64_t>& rows, const Device& device) {
  const OwnerGuard owner(device, "tables");
  return Tensor::from(rows, {static_cast<std::int64_t>(rows.size()) / 3, 3}, device);
}

PreparedGroups::~PreparedGroups() {
  for (auto& prepared : prepared_) device_.context().keep(std::move(prepared));
}

CollectiveGroup& PreparedGroups::next(const char* name) {
  const Tick has_run = device_.context().host_clock()[stream_];
  Prepared* found = nullptr;
  for (const auto& p : prepared_)
    if (p->tick <= has_run) found = p.get();
  if (!found) found = prepared_.emplace_back(std::make_shared<Prepared>()).get();
  found->group.name = name;
  found->group.items.clear();
  found->tick = device_.context().clock(stream_)[stream_] + 1;
  return found->group;
}

}  // namespace tessera::shard
