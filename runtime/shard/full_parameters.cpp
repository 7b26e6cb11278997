// Full parameters one by one, for files and for comparisons.
#include <algorithm>

#include "runtime/distributed/gatherer.hpp"
#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/lent.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/shard/fully_shard.hpp"

namespace tessera {
namespace {

const std::string kLender = "for_each_full_parameter";

}  // namespace

void for_each_full_parameter(
    nn::Module& module, const RankGroup& group,
    const std::function<void(const std::string& name, const Tensor& full)>& f) {
  const auto parameters = module.named_parameters();
  std::int64_t largest = 0;
  for (const auto& [name, p] : parameters)
    largest = std::max(largest, gathered_bytes(p.spec(), f32));
  Gatherer gatherer(group, largest);
  for (const auto& [name, p] : parameters) {
    const ShardSpec& spec = p.spec();
    TESSERA_EXPECT(spec.world == 1 || spec.world == group.size(), "parameter '", name,
                   "' is sharded over ", spec.world, " ranks, but group '", group.name(), "' has ",
                   group.size(), "; give the group of its mesh");
    const Tensor rows = p.shard();
    const Tensor whole =
        spec.world == 1 ? rows : gatherer.gather("all_gather_parameter", rows, spec);
    f(name, read_only(Lent(whole, kLender).tensor(), state_of(p)));
  }
  group.device().synchronize();
}

}  // namespace tessera
