#include "tessera/autograd/parameter.hpp"

#include <algorithm>

#include "runtime/tensor/launch.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

class ParameterLeaf final : public autograd::Leaf {
 public:
  explicit ParameterLeaf(ParameterState& state) : state_(state) {}
  Target take() override { return state_.place->take(state_.entry); }
  Tensor gradient() const override {
    const FlatGroup& group = *state_.group;
    if (!group.gradient.defined()) return {};
    const FlatEntry& entry = group.entries[static_cast<std::size_t>(state_.entry)];
    const Shape local = state_.spec.local_shape();
    return group.await_gradient().view(local, local.strides(), entry.offset);
  }
  // A group's gradient is cleared as a whole, by zero_grad of an optimizer.
  void clear() override {}

 private:
  ParameterState& state_;
};

// The padding between and behind the entries, as a table for kernels::Flat::complete.
Tensor place_table(const FlatGroup& group) {
  std::vector<std::int64_t> rows;
  for (std::size_t i = 0; i < group.entries.size(); ++i) {
    const FlatEntry& e = group.entries[i];
    const std::int64_t end =
        i + 1 < group.entries.size() ? group.entries[i + 1].offset : group.numel;
    rows.insert(rows.end(), {e.offset * 4, e.numel * 4, (end - e.offset) * 4});
  }
  const OwnerGuard owner(group.device, "tables");
  return Tensor::from(rows, {static_cast<std::int64_t>(group.entries.size()), 3}, group.device);
}

}  // namespace

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

LocalGradient::LocalGradient(FlatGroup& group)
    : group_(group),
      places_(place_table(group)),
      arrived_((group.entries.size() + 63) / 64),
      held_(group.entries.size()) {}

autograd::Leaf::Target LocalGradient::take(int entry) {
  if (!group_.gradient.defined()) {
    const OwnerGuard owner(group_.device, "gradients");
    group_.gradient = Tensor::empty({group_.numel + group_.counts_numel()}, f32, group_.device);
    fresh_ = true;
    std::fill(held_.begin(), held_.end(), false);
  }
  if (!completed_by_caller && !scheduled_) {
    // A pass that fails drops what was left for its end, and this with it.
    struct Pass {
      LocalGradient* gradient;
      ~Pass() {
        if (gradient->scheduled_) gradient->abandon();
      }
    };
    autograd::at_end_of_backward(
        [pass = std::make_shared<Pass>(this)] { pass->gradient->complete(); });
    scheduled_ = true;
  }
  const auto i = static_cast<std::size_t>(entry);
  const std::shared_ptr<ParameterState> p = group_.entries[i].parameter.lock();
  arrived_[i / 64] |= std::uint64_t{1} << (i % 64);
  const bool accumulate = held_[i];
  held_[i] = true;
  return {group_.gradient.view(p->shape, p->shape.strides(), group_.entries[i].offset), 1,
          accumulate};
}

void LocalGradient::complete() {
  scheduled_ = false;
  if (!group_.gradient.defined()) return;
  const Tensor counts = group_.counts();
  for (std::size_t word = 0; word < arrived_.size(); ++word) {
    kernels::CompleteArgs args{};
    args.base = group_.gradient.data();
    args.entries = reinterpret_cast<const kernels::PlaceEntry*>(places_.data());
    args.counts = counts.data();
    args.arrived = std::exchange(arrived_[word], 0);
    args.first = static_cast<std::int32_t>(word * 64);
    args.entry_count = static_cast<std::int32_t>(group_.entries.size());
    args.copies = 1;
    args.dtype = f32;
    args.zero_missing = fresh_;
    // Gaps and counts: next to nothing, unless gradients are missing.
    detail::launch("complete_gradient", group_.device, detail::table(group_.device).flat.complete,
                   args, {detail::reads(places_), {&group_.gradient, AccessMode::write, 0}});
  }
  if (fresh_) std::fill(held_.begin(), held_.end(), true);
  fresh_ = false;
}

void LocalGradient::abandon() noexcept {
  scheduled_ = false;
  if (std::all_of(arrived_.begin(), arrived_.end(), [](std::uint64_t word) { return word == 0; }))
    return;
  std::fill(arrived_.begin(), arrived_.end(), 0);
  group_.gradient = {};
}

Parameter::Parameter(const Shape& shape, Initializer initializer)
    : state_(std::make_shared<ParameterState>()) {
  shape.numel();  // checks
  state_->shape = shape;
  state_->initializer = initializer;
  state_->spec = {shape, 1, 0};
  state_->leaf = std::make_shared<ParameterLeaf>(*state_);
}

Tensor Parameter::value() const {
  TESSERA_EXPECT(state_ != nullptr, "an undefined parameter was used");
  TESSERA_EXPECT(state_->window != nullptr, "parameter '", state_->name,
                 "' has no memory yet; call materialize on the model first");
  TESSERA_EXPECT(!state_->window->is_closed(), "parameter '", state_->name, "' of unit '",
                 *state_->unit,
                 "' was used while the unit is closed; use it inside the module's call");
  if (state_->ready) state_->group->device.compute().wait(*state_->ready);
  Tensor out = Tensor::wrap(state_->window, state_->shape, state_->compute_dtype,
                            state_->window_offset_bytes);
  if (state_->trainable)
    out.grad_meta() = std::make_shared<GradMeta>(GradMeta{nullptr, state_->leaf});
  return out;
}

Tensor Parameter::shard() const {
  TESSERA_EXPECT(state_->group != nullptr, "parameter '", state_->name,
                 "' has no memory yet; call materialize on the model first");
  const FlatEntry& entry = state_->group->entries[static_cast<std::size_t>(state_->entry)];
  const Shape local = state_->spec.local_shape();
  return state_->group->values.view(local, local.strides(), entry.offset);
}

Tensor Parameter::grad() const { return state_->group ? state_->leaf->gradient() : Tensor(); }

void materialize_whole(const std::string& name, const std::vector<Parameter>& parameters,
                       const Device& device) {
  for (const bool trainable : {true, false}) {
    std::vector<std::shared_ptr<ParameterState>> states;
    for (const Parameter& p : parameters) {
      TESSERA_EXPECT(p.state()->group == nullptr || p.trainable() != trainable,
                     "materialize: parameter '", p.name(), "' already has memory");
      if (p.trainable() == trainable) states.push_back(p.state());
    }
    if (states.empty()) continue;
    const auto group = FlatGroup::make(name, states, device);
    const auto place = trainable ? std::make_shared<LocalGradient>(*group) : nullptr;
    for (const auto& state : states) {
      state->place = place;
      state->window = group->values.storage();
      state->window_offset_bytes =
          group->entries[static_cast<std::size_t>(state->entry)].offset * 4;
    }
  }
}

std::vector<std::shared_ptr<FlatGroup>> groups_of(const std::vector<Parameter>& parameters) {
  std::vector<std::shared_ptr<FlatGroup>> groups;
  for (const Parameter& p : parameters) {
    TESSERA_EXPECT(p.state()->group != nullptr, "parameter '", p.name(),
                   "' has no memory yet; call materialize on the model first");
    if (std::find(groups.begin(), groups.end(), p.state()->group) == groups.end())
      groups.push_back(p.state()->group);
  }
  return groups;
}

}  // namespace tessera
