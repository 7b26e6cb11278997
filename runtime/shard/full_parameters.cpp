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

// What is put together of ranks at different steps would be of none.
void expect_same_steps(const RankGroup& group, std::uint64_t steps) {
  double ends[] = {-static_cast<double>(steps), static_cast<double>(steps)};
  if (group.size() > 1) group.max(ends, "compare steps of optimizers");
  TESSERA_EXPECT(-ends[0] == ends[1], kLender, ": here optimizers have updated parameters ", steps,
                 " times in all, on one rank ", -ends[0], ", on another ", ends[1],
                 "; every rank makes the same steps");
}

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
      steps[&mesh->shard_group()] += state_of(p)->group->steps();
    }
  std::map<const RankGroup*, Gatherer> gatherers;
  for (const auto& [name, p] : parameters) {
    const Tensor rows = p.shard();
    Tensor full = rows;
    if (const auto mesh = p.mesh()) {
      const RankGroup& group = mesh->shard_group();
      const auto [at, is_first] = gatherers.try_emplace(&group, group, largest[&group]);
      if (is_first) expect_same_steps(group, steps[&group]);
      full = raw::contiguous(at->second.gather("all_gather_parameter", rows, p.spec()));
    }
    f(name, read_only(Lent(full, kLender).tensor(), state_of(p)));
  }
  for (const auto& [group, gatherer] : gatherers) group->device().synchronize();
}

}  // namespace tessera
