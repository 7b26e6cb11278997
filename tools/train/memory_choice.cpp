#include "tools/train/memory_choice.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/base/machine.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/device/driver.hpp"
#include "tessera/device/device_context.hpp"
#include "tools/train/dry_run.hpp"

namespace tessera::train {
namespace {

struct Way {
  std::string name;
  Config config;
};

// From the fastest to the one that needs least. What else a configuration may leave open (the unit
// that is called last open until backward, recomputation) makes more of them here, in that order.
std::vector<Way> ways_of(const Config& config) {
  std::vector<Way> ways;
  for (const auto& [name, order] :
       {std::pair("fast", LossChoice::fast), std::pair("lean", LossChoice::lean)}) {
    if (config.training.loss != LossChoice::automatic && config.training.loss != order) continue;
    ways.emplace_back(concat("training.loss=", name), config).config.training.loss = order;
  }
  return ways;
}

}  // namespace

std::optional<std::int64_t> memory_limit(const Config& config, const World& world) {
  if (config.memory.limit) return config.memory.limit;
  const Driver* const driver = world.device().context().driver();
  std::int64_t unused = 0, total = 0;
  std::int32_t gpus = 0;
  if (driver == nullptr || driver->memory_info(&unused, &total) || driver->count(&gpus))
    return std::nullopt;
  const bool is_shared =
      world.kind() == WorldKind::local && (device_choice(config).index || gpus < world.size());
  const std::int64_t share = is_shared ? total / world.size() : total;
  return static_cast<std::int64_t>(-world.max(-static_cast<double>(share)));
}

std::int64_t reserved_bytes(const MemoryPlan& plan) {
  return std::max({largest(plan.steps).reserved_bytes, plan.evaluation.reserved_bytes,
                   plan.save.reserved_bytes}) +
         (plan.has_nccl ? plan.nccl_bytes : 0);
}

Chosen choose_by_memory(const Config& config, std::optional<std::int64_t> limit,
                        const std::function<MemoryPlan(const Config&)>& plan_of,
                        const std::function<double(double)>& most) {
  std::vector<Way> ways = ways_of(config);
  if (!limit) ways.erase(ways.begin(), ways.end() - 1);
  std::string plans;
  for (Way& way : ways) {
    MemoryPlan plan = plan_of(way.config);
    const auto bytes = static_cast<std::int64_t>(most(static_cast<double>(reserved_bytes(plan))));
    plans += concat(plans.empty() ? "" : "; ", way.name, " reserves ", bytes, " bytes");
    if (limit && bytes > *limit) continue;
    const std::string told = ways.size() == 1 ? ""
                                              : concat("chosen ", way.name, " within ", *limit,
                                                       " bytes a rank: ", plans);
    return {std::move(way.config), std::move(plan), told};
  }
  throw OutOfMemory(concat("memory.limit: nothing fits within ", *limit, " bytes a rank: ", plans,
                           "; make the model or the batch smaller, recompute more "
                           "(activation_checkpoint.mode), or use more ranks"));
}

Chosen choose_for(Config config, const World& world, std::int64_t heldout_samples) {
  if (world.kind() != WorldKind::nccl) config.comm.windows = false;  // nor are there granules
  const std::int64_t batch = split_batch(config, world.size()).local * world.size();
  return choose_by_memory(
      config, memory_limit(config, world),
      [&](const Config& c) {
        MemoryPlan plan =
            plan_memory(c, world.rank(), world.size(), nullptr,
                        std::clamp<std::int64_t>(ceil_div(heldout_samples, batch), 1, 2));
        plan.has_nccl = world.kind() == WorldKind::nccl && !c.memory.limit;  // it shares the GPU
        return plan;
      },
      [&world](double bytes) { return world.max(bytes); });
}

// A CPU's two memories are one machine's.
void check_machine(const MemoryPlan& plan, const World& world, std::int64_t weight_bytes) {
  if (world.device().kind() != DeviceKind::cpu) return;
  const PhaseMemory most = largest(plan.steps);
  const std::int64_t size = world.size(), here = world.kind() == WorldKind::local ? size : 1,
                     have = physical_memory_bytes(),
                     rank = std::max(weight_bytes / size,
                                     most.reserved_bytes + most.host_reserved_bytes);
  if (have == 0 || rank <= have / here) return;
  throw OutOfMemory(concat("memory planned: ", mebibytes(rank), " a rank for ", here,
                           here == 1 ? " rank" : " ranks", ", and this machine has ",
                           mebibytes(have),
                           "; make the model or the batch smaller, or use more machines"));
}

}  // namespace tessera::train
