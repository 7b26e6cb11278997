#include "tessera/param/parameter.hpp"

#include <utility>

#include "runtime/param/parameter_state.hpp"

namespace tessera {
namespace {

// The full tensor, without history.
Tensor view_of(const std::shared_ptr<ParameterState>& state) {
  Tensor full =
      Tensor::wrap(state->window, state->shape, state->compute_dtype, state->window_offset_bytes);
  if (state->spec.dim > 0) full = full.view(state->shape, state->spec.strides(state->shape), 0);
  return read_only(std::move(full), state);
}

}  // namespace

// --- what the tape asks of it ---

autograd::GradientSink ParameterState::sink() {
  const int i = flat_entry().trainable;
  TESSERA_EXPECT(i >= 0 && sinks, "backward: parameter '", name,
                 "' was frozen, thawed or sharded since the forward that used it; go backward "
                 "before");
  return sinks->sink(i);
}
Tensor ParameterState::gradient() const {
  if (!group || !group->gradient.defined() || !has_gradient()) return {};
  const Shape local = spec.local_shape();
  return group->await_gradient().view(local, spec.strides(local), flat_entry().gradient_offset);
}
void ParameterState::clear() {
  TESSERA_EXPECT(false, "Tensor::zero_grad: parameter '", name,
                 "' shares the gradient of its flat group; call zero_grad of an optimizer");
}
std::uint64_t ParameterState::version() const { return group->version; }
void ParameterState::expect_version(std::uint64_t forward) const {
  TESSERA_EXPECT(version() == forward, "backward: parameter '", name,
                 "' was updated after the forward that is recomputed; go backward first");
}
void ParameterState::on_last_contribution() {
  if (sinks) sinks->on_last_contribution(flat_entry().trainable);
}

Tensor ParameterState::rows() const {
  TESSERA_EXPECT(group != nullptr, without_memory());
  const Shape local = spec.local_shape();
  return group->values.view(local, spec.strides(local), flat_entry().offset);
}

// --- the handle ---

Parameter::Parameter(const Shape& shape, Initializer initializer)
    : state_(std::make_shared<ParameterState>()) {
  shape.numel();  // checks
  state_->shape = shape;
  state_->initializer = std::move(initializer);
  state_->spec = {shape, 1, 0};
}

const std::shared_ptr<ParameterState>& state_of(const Parameter& parameter) {
  TESSERA_EXPECT(parameter.defined(), "an undefined parameter was used");
  return parameter.state_;
}

const Shape& Parameter::shape() const { return state_of(*this)->shape; }
const std::string& Parameter::name() const { return state_of(*this)->name; }
const ShardSpec& Parameter::spec() const { return state_of(*this)->spec; }
std::shared_ptr<const DeviceMesh> Parameter::mesh() const { return state_of(*this)->mesh; }
const std::string* Parameter::unit() const { return state_of(*this)->unit; }
Device Parameter::device() const {
  const ParameterState& state = *state_of(*this);
  return state.group ? state.group->device : Device::meta();
}
bool Parameter::trainable() const { return state_of(*this)->trainable; }

std::shared_ptr<ParameterSlices> Parameter::made_slices() const { return state_of(*this)->slices; }
int Parameter::slices() const { return made_slices() ? state_->slices->count() : 1; }

void Parameter::set_initializer(Initializer how) const {
  state_of(*this)->initializer = std::move(how);
}

Tensor Parameter::value() const {
  TESSERA_EXPECT(!state_of(*this)->is_streamed, "parameter '", state_->name, "' of unit '",
                 *state_->unit,
                 "' is streamed: it is there one slice at a time, from the first call of the root "
                 "on, and only the modules that stream it can use it, by for_each_slice",
                 state_->streaming_modules());
  return value_of(state_);
}

Tensor value_of(const std::shared_ptr<ParameterState>& state) {
  TESSERA_EXPECT(state->window != nullptr, state->without_memory());
  TESSERA_EXPECT(!state->window->is_closed(), "parameter '", state->name, "' of unit '",
                 *state->unit,
                 "' was used while the unit is closed; use it inside the module's call",
                 state->names > 1 ? ", or make one unit around all modules that share it" : "");
  TESSERA_EXPECT(!state->unit || state->window->version == state->group->version, "parameter '",
                 state->name, "' of unit '", *state->unit,
                 "' was updated since the unit was opened; outside of calls, call unshard again");
  if (!state->unit && !state->group->is_laid_out) state->group->lay_out_gradient();
  if (state->ready) state->window->device.compute().wait(*state->ready);
  if (!state->trainable) return view_of(state);
  autograd::note_use(state);
  return state->full ? *state->full : with_history(state);
}

Tensor with_history(const std::shared_ptr<ParameterState>& state) {
  Tensor out = view_of(state);
  out.history().leaf = state;
  return out;
}

Tensor Parameter::shard() const { return read_only(state_of(*this)->rows(), state_); }
Tensor Parameter::grad() const { return state_of(*this)->gradient(); }

}  // namespace tessera
