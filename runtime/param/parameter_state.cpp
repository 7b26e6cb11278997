#include "runtime/param/parameter_state.hpp"

#include "tessera/tensor/ops.hpp"

namespace tessera {

std::string ParameterState::called() const {
  return name.empty() ? concat("parameter of shape ", shape) : concat("parameter '", name, "'");
}

std::string ParameterState::without_memory() const {
  return called() +
         " has no memory yet; register it and its module, and call materialize on the model first";
}

std::string ParameterState::streaming_modules() const {
  std::string names;
  for (const Streaming& by : streaming)
    names += concat(names.empty() ? ": '" : ", '", by.name.empty() ? "(root)" : by.name, '\'');
  return names;
}

std::string ParameterState::described() const {
  return name.empty() ? called() : concat(called(), " of shape ", shape);
}

autograd::GradientSink ParameterState::sink() {
  const int i = flat_entry().trainable;
  TESSERA_EXPECT(
      i >= 0 && sinks, "backward: parameter '", name,
      "' was frozen, thawed or sharded since the forward that used it; run backward before that");
  return sinks->sink(i);
}
Tensor ParameterState::gradient() const {
  if (!group || !group->gradient.defined() || !has_gradient()) return {};
  const Shape local = spec.local_shape();
  return group->await_gradient().view(local, spec.strides(local), flat_entry().gradient_offset);
}
void ParameterState::clear() {
  TESSERA_EXPECT(
      false, "Tensor::zero_grad: parameter '", name,
      "' shares the gradient of its flat group; call zero_grad of its module or of an optimizer");
}
std::uint64_t ParameterState::version() const { return group->version; }
void ParameterState::expect_version(std::uint64_t forward) const {
  TESSERA_EXPECT(version() == forward, "backward: parameter '", name,
                 "' was updated after the forward that is recomputed; run backward first");
}
void ParameterState::on_last_contribution() {
  if (sinks) sinks->on_last_contribution(flat_entry().trainable);
}

Tensor ParameterState::rows() const {
  TESSERA_EXPECT(group != nullptr, without_memory());
  const Shape local = spec.local_shape();
  return group->values.view(local, spec.strides(local), flat_entry().offset);
}

// --- what backward has kept without reducing it ---

void ParameterState::drop_unreduced() const {
  if (slices)
    slices->drop_unreduced();
  else if (sinks)
    sinks->drop_unreduced(flat_entry().trainable);
}

void ParameterState::drop_gradient() const {
  const FlatEntry& entry = flat_entry();
  if (entry.trainable < 0) return;
  drop_unreduced();
  if (!group->gradient.defined()) return;
  const Shape local = spec.local_shape();
  raw::fill(group->await_gradient().view(local, spec.strides(local), entry.gradient_offset), 0);
  raw::fill(raw::slice(group->counts(), 0, entry.trainable, entry.trainable + 1), 0);
}

}  // namespace tessera
