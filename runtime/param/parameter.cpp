#include "tessera/param/parameter.hpp"

#include <algorithm>
#include <utility>

#include "runtime/tensor/lent.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

const std::string kEdit = "Parameter::edit";

// This rank's rows of the values.
Tensor rows_of(const ParameterState& state) {
  TESSERA_EXPECT(state.group != nullptr, "parameter '", state.name,
                 "' has no memory yet; call materialize on the model first");
  const FlatEntry& entry = state.group->entries[static_cast<std::size_t>(state.entry)];
  const Shape local = state.spec.local_shape();
  return state.group->values.view(local, local.strides(), entry.offset);
}

// This rank's rows of the gradient.
Tensor gradient_of(const ParameterState& state) {
  if (!state.group || !state.group->gradient.defined()) return {};
  const FlatEntry& entry = state.group->entries[static_cast<std::size_t>(state.entry)];
  const Shape local = state.spec.local_shape();
  return state.group->await_gradient().view(local, local.strides(), entry.offset);
}

// Keeps the parameter: a graph may outlive its module.
class ParameterLeaf final : public autograd::Leaf {
 public:
  explicit ParameterLeaf(std::shared_ptr<ParameterState> state) : state_(std::move(state)) {}
  autograd::GradientSink sink() override { return state_->sinks->sink(state_->entry); }
  Tensor gradient() const override { return gradient_of(*state_); }
  // A group's gradient is cleared as a whole, by zero_grad of an optimizer.
  void clear() override {}
  void on_last_use() override { state_->sinks->on_last_use(state_->entry); }

 private:
  std::shared_ptr<ParameterState> state_;
};

// The one that graphs hold, or the first.
std::shared_ptr<autograd::Leaf> leaf_of(const std::shared_ptr<ParameterState>& state) {
  std::shared_ptr<autograd::Leaf> leaf = state->leaf.lock();
  if (!leaf) state->leaf = leaf = std::make_shared<ParameterLeaf>(state);
  return leaf;
}

}  // namespace

Parameter::Parameter(const Shape& shape, Initializer initializer)
    : state_(std::make_shared<ParameterState>()) {
  shape.numel();  // checks
  state_->shape = shape;
  state_->initializer = initializer;
  state_->spec = {shape, 1, 0};
}

Tensor Parameter::value() const {
  TESSERA_EXPECT(state_ != nullptr, "an undefined parameter was used");
  TESSERA_EXPECT(!state_->is_streamed, "parameter '", state_->name, "' of unit '", *state_->unit,
                 "' is streamed: it is there one slice at a time, from the first call of the root "
                 "on, and only the modules that stream it can use it, by for_each_slice");
  return value_of(state_);
}

void Parameter::freeze() {
  TESSERA_EXPECT(!state_->unit, "freeze: parameter '", state_->name, "' belongs to unit '",
                 *state_->unit, "', which reduces its gradient; freeze it before fully_shard");
  state_->trainable = false;
}

Tensor value_of(const std::shared_ptr<ParameterState>& state) {
  TESSERA_EXPECT(state->window != nullptr, "parameter '", state->name,
                 "' has no memory yet; call materialize on the model first");
  TESSERA_EXPECT(!state->window->is_closed(), "parameter '", state->name, "' of unit '",
                 *state->unit,
                 "' was used while the unit is closed; use it inside the module's call");
  if (state->ready) state->group->device.compute().wait(*state->ready);
  Tensor out = read_only(
      Tensor::wrap(state->window, state->shape, state->compute_dtype, state->window_offset_bytes),
      state);
  if (!state->trainable) return out;
  const auto leaf = leaf_of(state);
  autograd::note_use(leaf);
  out.grad_meta() = std::make_shared<GradMeta>(GradMeta{nullptr, leaf});
  return out;
}

Tensor Parameter::shard() const { return read_only(rows_of(*state_), state_); }
Tensor Parameter::grad() const { return gradient_of(*state_); }

void Parameter::edit(const std::function<void(const Tensor& rows)>& f) const {
  const Tensor rows = rows_of(*state_);
  FlatGroup& group = *state_->group;
  group.device.compute().wait(group.device.gather().record());  // it may still read them
  ++rows.storage()->version;  // for what saved them where they are whole
  rows.storage()->last_writer = kEdit.c_str();
  try {
    f(Lent(rows, kEdit).tensor());
  } catch (...) {
    group.mark_updated();
    throw;
  }
  group.mark_updated();
}

void Parameter::assign(const Tensor& values) const {
  const Shape local = state_->spec.local_shape();
  TESSERA_EXPECT(values.shape() == local && is_floating(values.dtype()), "parameter '", name(),
                 "' is assigned ", values.shape(), " of ", values.dtype(),
                 "; this rank's rows are ", local, ", of a floating dtype");
  edit([&](const Tensor& rows) { raw::copy_into(rows, values); });
}

void materialize_whole(const std::string& name, const std::vector<Parameter>& parameters,
                       const Device& device) {
  constexpr std::int64_t kEnough = (std::int64_t{16} << 20) / 4;  // elements of a group
  const auto make = [&](const std::vector<std::shared_ptr<ParameterState>>& states) {
    const auto group = FlatGroup::make(name, states, device);
    const auto sinks = states[0]->trainable ? std::make_shared<LocalGradient>(group) : nullptr;
    for (const auto& state : states) {
      state->sinks = sinks;
      state->window = group->values.storage();
      state->window_offset_bytes =
          group->entries[static_cast<std::size_t>(state->entry)].offset * 4;
    }
  };
  for (const Parameter& p : parameters)
    TESSERA_EXPECT(p.state()->group == nullptr, "materialize: parameter '", p.name(),
                   "' already has memory");
  for (const bool trainable : {true, false}) {
    std::vector<std::shared_ptr<ParameterState>> states;
    std::int64_t numel = 0;
    for (const Parameter& p : parameters) {
      if (p.trainable() != trainable) continue;
      states.push_back(p.state());
      numel = checked_add(numel, p.shape().numel());
      if (numel < kEnough) continue;
      make(std::exchange(states, {}));
      numel = 0;
    }
    if (!states.empty()) make(states);
  }
}

std::vector<std::shared_ptr<FlatGroup>> groups_of(const std::vector<Parameter>& parameters) {
  std::vector<std::shared_ptr<FlatGroup>> groups;
  for (const Parameter& p : parameters) {
    TESSERA_EXPECT(p.defined(), "an undefined parameter was given");
    TESSERA_EXPECT(p.state()->group != nullptr, "parameter '", p.name(),
                   "' has no memory yet; call materialize on the model first");
    if (std::find(groups.begin(), groups.end(), p.state()->group) == groups.end())
      groups.push_back(p.state()->group);
  }
  return groups;
}

std::vector<GroupPart> parts_of(const std::vector<Parameter>& parameters) {
  std::vector<GroupPart> parts;
  for (const auto& group : groups_of(parameters)) {
    std::vector<bool> is_given(group->entries.size() + 1);  // and one that is not, at the end
    for (const Parameter& p : parameters)
      if (p.state()->group == group) is_given[static_cast<std::size_t>(p.state()->entry)] = true;
    GroupPart& part = parts.emplace_back(GroupPart{group, {}});
    for (std::size_t end = 0; end < group->entries.size(); ++end) {
      if (!is_given[end]) continue;
      const std::size_t first = end;
      while (is_given[end]) ++end;
      part.runs.push_back({first, end});
    }
  }
  return parts;
}

bool GroupPart::is_whole() const {
  return runs.size() == 1 && runs[0].end - runs[0].first == group->entries.size();
}

Tensor GroupPart::gradient(const Run& run) const {
  const auto offset_of = [&](std::size_t entry) {
    return entry < group->entries.size() ? group->entries[entry].offset : group->numel;
  };
  const std::int64_t begin = offset_of(run.first);
  return group->await_gradient().view({offset_of(run.end) - begin}, {1}, begin);
}

Tensor GroupPart::counts(const Run& run) const {
  return group->await_gradient().view({static_cast<std::int64_t>(run.end - run.first)}, {1},
                                      group->numel + static_cast<std::int64_t>(run.first));
}

}  // namespace tessera
