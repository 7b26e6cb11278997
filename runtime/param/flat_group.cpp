#include "tessera/param/flat_group.hpp"

#include <algorithm>

#include "tessera/memory/memory.hpp"
#include "tessera/param/parameter.hpp"

namespace tessera {

std::shared_ptr<FlatGroup> FlatGroup::make(
    std::string name, const std::vector<std::shared_ptr<ParameterState>>& parameters,
    const Device& device) {
  auto group = std::make_shared<FlatGroup>();
  group->name = std::move(name);
  group->device = device;
  for (const auto& p : parameters) {
    const std::int64_t chunk = p->spec.chunk_numel(),
                       own = p->spec.owned().size() * p->spec.row_numel();
    group->entries.push_back({group->numel, p->shape.ndim() == 0 ? 1 : own, chunk, p});
    p->entry = static_cast<int>(group->entries.size()) - 1;
    p->group = group;
    group->trainable = p->trainable;
    group->numel = checked_add(group->numel, round_up(chunk, kFlatAlign));
  }
  const OwnerGuard owner(device, "weights");
  group->values = Tensor::zeros({group->numel}, f32, device);
  group->mark_updated();
  return group;
}

}  // namespace tessera
