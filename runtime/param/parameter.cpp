#include "tessera/param/parameter.hpp"

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

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
  TESSERA_EXPECT(!state_->slices, "parameter '", state_->name,
                 "' is streamed: it is there one slice at a time, and only the modules that stream "
                 "it can use it, by for_each_slice");
  return value_of(state_);
}

Tensor value_of(const std::shared_ptr<ParameterState>& state) {
  TESSERA_EXPECT(state->window != nullptr, "parameter '", state->name,
                 "' has no memory yet; call materialize on the model first");
  TESSERA_EXPECT(!state->window->is_closed(), "parameter '", state->name, "' of unit '",
                 *state->unit,
                 "' was used while the unit is closed; use it inside the module's call");
  if (state->ready) state->group->device.compute().wait(*state->ready);
  Tensor out =
      Tensor::wrap(state->window, state->shape, state->compute_dtype, state->window_offset_bytes);
  if (state->trainable)
    out.grad_meta() = std::make_shared<GradMeta>(GradMeta{nullptr, leaf_of(state)});
  return out;
}

Tensor Parameter::shard() const {
  TESSERA_EXPECT(state_->group != nullptr, "parameter '", state_->name,
                 "' has no memory yet; call materialize on the model first");
  const FlatEntry& entry = state_->group->entries[static_cast<std::size_t>(state_->entry)];
  const Shape local = state_->spec.local_shape();
  return state_->group->values.view(local, local.strides(), entry.offset);
}

Tensor Parameter::grad() const { return gradient_of(*state_); }

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
    const auto sinks = trainable ? std::make_shared<LocalGradient>(group) : nullptr;
    for (const auto& state : states) {
      state->sinks = sinks;
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
