// Full parameters one by one, for files and for comparisons.
#include <algorithm>
#include <map>

#include "runtime/distributed/gatherer.hpp"
#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/lent_tensor.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

const std::string kLender = "for_each_full_parameter";

}  // namespace

void for_each_full_parameter(
    nn::Module& module, const std::function<void(const std::string& name, const Tensor& full)>& f) {
  const auto parameters = module.named_parameters();
  std::map<const RankGroup*, std::int64_t> largest;  // bytes
  std::map<const RankGroup*, std::uint64_t> steps;   // of each parameter
  for (const auto& [name, p] : parameters)
    if (const auto mesh = p.mesh()) {
      std::int64_t& bytes = largest[&mesh->shard_group()];
      bytes = std::max(bytes, gathered_bytes(p.spec(), p.dtype()));
      steps[&mesh->shard_group()] += updates_of(p);
    }
  std::map<const RankGroup*, Gatherer> gatherers;
  for (const auto& [name, p] : parameters) {
    const Tensor rows = p.shard();
    Tensor full = rows;
    if (const auto mesh = p.mesh()) {
      const RankGroup& group = mesh->shard_group();
      if (!gatherers.contains(&group)) {  // by name, before what has none
        expect_same_steps(kLender, group, steps[&group]);
        gatherers.try_emplace(&group, group, largest[&group], kLender);
      }
      full = raw::contiguous(gatherers.at(&group).gather("all_gather_parameter", rows, p.spec()));
    }
    f(name, read_only(LentTensor(full, kLender).tensor(), state_of(p)));
  }
  for (const auto& [group, gatherer] : gatherers) group->device().synchronize();
}

}  // namespace tessera
