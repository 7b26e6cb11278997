// A backward that this rank leaves out while its peers run it.
#include "runtime/shard/unit.hpp"
#include "runtime/shard/unit_region.hpp"

namespace tessera {

void skip_backward(nn::Module& root) {
  const auto* const unit = dynamic_cast<shard::Unit*>(root.hook().get());
  TESSERA_EXPECT(unit && (!unit->context() || unit->shards().is_root()),
                 "skip_backward: the module is no root; give the one of the outermost fully_shard");
  autograd::skip_backward([&](autograd::Region& region) {
    const auto* const call = shard::UnitRegion::of(region);
    const auto called = call ? call->unit() : nullptr;
    return called && called->context() == unit->context();
  });
}
void skip_backward(const Tensor& loss, bool retain_graph) {
  autograd::skip_backward(loss, retain_graph);
}

}  // namespace tessera
