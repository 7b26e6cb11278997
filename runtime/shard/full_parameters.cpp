// Full parameters one by one, for files and for comparisons.
#include <algorithm>
#include <map>

#include "runtime/distributed/gatherer.hpp"
#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/lent.hpp"
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
      const auto [at, is_first] = gatherers.try_emplace(&group, group, largest[&group]);
      if (is_first) expect_same_steps(kLender, group, steps[&group]);
      full = raw::contiguous(at->second.gather("all_gather_parameter", rows, p.spec()));
    }
    f(name, read_only(Lent(full, kLender).tensor(), state_of(p)));
  }
  for (const auto& [group, gatherer] : gatherers) group->device().synchronize();
}

}  // namespace tessera
