#include "runtime/param/flat_group.hpp"

#include "runtime/param/parameter_state.hpp"
#include "runtime/param/update_log.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/detail/memory/step_memory.hpp"
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
  return group;
}

std::uint64_t FlatGroup::steps() const noexcept {
  std::uint64_t sum = 0;
  for (const auto& [entry, log] : updates) sum += static_cast<std::uint64_t>(log->told);
  return sum;
}

std::uint64_t FlatGroup::steps_of_each() const noexcept {
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio
  std::uint64_t hash = 0;
  for (const auto& [entry, log] : updates)
    hash = hash * kOdd + static_cast<std::uint64_t>(log->told);
  return hash;
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

void FlatGroup::set_unreduced(std::size_t first, std::size_t end, bool is_unreduced) {
  if (unreduced.empty() && !is_unreduced) return;
  unreduced.resize(trainable.size());
  for (std::size_t i = first; i < end; ++i) unreduced[i] = is_unreduced;
  if (std::ranges::find(unreduced, true) == unreduced.end()) unreduced.clear();
}

void FlatGroup::expect_reduced(const char* function, std::size_t first, std::size_t end) const {
  for (std::size_t i = first; i < std::min(end, unreduced.size()); ++i) {
    if (!unreduced[i]) continue;
    const std::shared_ptr<ParameterState> p = trained(i).parameter.lock();
    throw ContractError(concat(
        function, ": unit '", name, "' has a gradient of parameter '", p ? p->name : "",
        "' that was not reduced yet, as set_requires_gradient_sync says; run backward once more "
        "after set_requires_gradient_sync(model, true), or drop the gradient by zero_grad"));
  }
}

}  // namespace tessera
