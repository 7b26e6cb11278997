#include "runtime/param/flat_group.hpp"

#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/memory/step_memory.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

std::shared_ptr<FlatGroup> FlatGroup::make(
    std::string name, const std::vector<std::shared_ptr<ParameterState>>& parameters,
    const Device& device) {
  auto group = std::make_shared<FlatGroup>();
  group->name = std::move(name);
  group->device = device;
  const DType dtype = parameters.empty() ? f32 : parameters[0]->dtype;
  const std::int64_t align = kAlignmentBytes / static_cast<std::int64_t>(size_bytes(dtype));
  for (const auto& p : parameters) {
    const std::int64_t chunk = p->spec.chunk_numel(),
                       own = p->spec.owned().size() * p->spec.row_numel();
    group->entries.push_back({group->numel, p->shape.ndim() == 0 ? 1 : own, chunk, p});
    p->entry = static_cast<int>(group->entries.size()) - 1;
    p->group = group;
    group->numel = checked_add(group->numel, round_up(chunk, align));
  }
  const OwnerGuard owner(device, "weights");
  group->values = Tensor::zeros({group->numel}, dtype, device);
  group->lay_out_gradient();
  group->mark_updated();
  group->edits = group->version;
  return group;
}

void FlatGroup::note_gradient() noexcept {
  if (StepMemory* const step = StepMemory::of(device))
    step->depends_on(this, gradient.defined(),
                     [this] { return gradient.defined() + 2 * factor.defined(); });
}

void FlatGroup::apply_factor() {
  note_gradient();
  if (!factor.defined()) return;
  await_reduced();
  detail::multiply("scale_gradient", gradient.view({gradient_numel}, {1}, 0), factor);
  factor = {};
}

void FlatGroup::lay_out_gradient() {
  const std::vector<FlatEntry> before = entries;
  const Tensor held = gradient.defined() ? await_gradient() : Tensor(),
               held_counts = gradient.defined() ? counts() : Tensor();
  trainable.clear();
  unreduced.clear();  // of what was frozen
  gradient_numel = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    FlatEntry& entry = entries[i];
    const std::shared_ptr<ParameterState> p = entry.parameter.lock();
    entry.trainable = -1;
    if (!p || !p->trainable) continue;
    entry.trainable = static_cast<int>(trainable.size());
    entry.gradient_offset = gradient_numel;
    trainable.push_back(static_cast<int>(i));
    gradient_numel = checked_add(gradient_numel, round_up(entry.chunk, kFlatAlign));
  }
  ++layouts;
  is_laid_out = true;
  if (!held.defined()) return;
  const OwnerGuard owner(device, "gradients");
  gradient = Tensor::zeros({gradient_numel + counts_numel()}, f32, device);
  const auto copy = [](const Tensor& to, std::int64_t at, const Tensor& from, std::int64_t begin,
                       std::int64_t numel) {
    raw::copy_into(to.view({numel}, {1}, at), from.view({numel}, {1}, begin));
  };
  for (const int i : trainable) {
    const FlatEntry &to = entries[static_cast<std::size_t>(i)],
                    &from = before[static_cast<std::size_t>(i)];
    if (from.trainable < 0) continue;
    copy(gradient, to.gradient_offset, held, from.gradient_offset, to.chunk);
    copy(counts(), to.trainable, held_counts, from.trainable, 1);
  }
}

}  // namespace tessera
