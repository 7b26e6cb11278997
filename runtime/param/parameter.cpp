#include "tessera/param/parameter.hpp"

#include <map>
#include <utility>

#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/lent.hpp"
#include "tessera/device/captured_work.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

const std::string kEdit = "Parameter::edit";

// Behind what is said of them; empty where none of them is alive.
std::string streaming_modules(const ParameterState& state) {
  std::string names;
  for (const ParameterState::Streaming& by : state.streaming)
    names += concat(names.empty() ? ": '" : ", '", by.name.empty() ? "(root)" : by.name, '\'');
  return names;
}

// This rank's rows of the values.
Tensor rows_of(const ParameterState& state) {
  TESSERA_EXPECT(state.group != nullptr, state.without_memory());
  const Shape local = state.spec.local_shape();
  return state.group->values.view(local, state.spec.strides(local), state.flat_entry().offset);
}

// The full tensor, without history.
Tensor view_of(const std::shared_ptr<ParameterState>& state) {
  Tensor full =
      Tensor::wrap(state->window, state->shape, state->compute_dtype, state->window_offset_bytes);
  if (state->spec.dim > 0) full = full.view(state->shape, state->spec.strides(state->shape), 0);
  return read_only(std::move(full), state);
}

// This rank's rows of the gradient.
Tensor gradient_of(const ParameterState& state) {
  if (!state.group || !state.group->gradient.defined() || !state.has_gradient()) return {};
  const Shape local = state.spec.local_shape();
  return state.group->await_gradient().view(local, state.spec.strides(local),
                                            state.flat_entry().gradient_offset);
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
Tensor ParameterState::gradient() const { return gradient_of(*this); }
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
bool Parameter::is_streamed() const {
  return unit() ? state_->is_streamed : state_->may_be_streamed();
}

void Parameter::set_name(const std::string& name) const { state_of(*this)->name = name; }
void Parameter::count_name(int by) const { state_of(*this)->names += by; }
bool Parameter::is_tied() const { return state_of(*this)->names > 1; }
void Parameter::count_module(int by) const { state_of(*this)->modules += by; }
void Parameter::add_streaming(const nn::Module& module) const {
  state_of(*this)->streaming.push_back({&module, ""});
}
void Parameter::remove_streaming(const nn::Module& module) const {
  std::erase_if(state_of(*this)->streaming,
                [&](const ParameterState::Streaming& by) { return by.module == &module; });
}
void Parameter::name_streaming(const nn::Module& module, const std::string& name) const {
  for (ParameterState::Streaming& by : state_of(*this)->streaming)
    if (by.module == &module && by.name.size() < name.size()) by.name = name;
}

void Parameter::set_initializer(Initializer how) const {
  state_of(*this)->initializer = std::move(how);
}

Tensor Parameter::value() const {
  TESSERA_EXPECT(!state_of(*this)->is_streamed, "parameter '", state_->name, "' of unit '",
                 *state_->unit,
                 "' is streamed: it is there one slice at a time, from the first call of the root "
                 "on, and only the modules that stream it can use it, by for_each_slice",
                 streaming_modules(*state_));
  return value_of(state_);
}

void Parameter::set_trainable(bool trainable) const {
  if (this->trainable() == trainable) return;
  TESSERA_EXPECT(!autograd::in_backward() && !autograd::in_call(), "set_trainable: parameter '",
                 state_->name,
                 "' is frozen or thawed between steps, outside of calls and backward");
  TESSERA_EXPECT(
      !trainable || state_->dtype == f32, "set_trainable: ", state_->called(), " is stored in ",
      state_->dtype,
      ", and what is trained is stored in f32; give it set_dtype(f32) before materialize");
  if (state_->group)
    state_->group->expect_reduced("set_trainable", 0, state_->group->unreduced.size());
  if (const Tensor gradient = gradient_of(*state_); gradient.defined()) {  // none from here on
    raw::fill(gradient, 0);
    raw::fill(raw::slice(state_->group->counts(), 0, state_->flat_entry().trainable,
                         state_->flat_entry().trainable + 1),
              0);
  }
  state_->trainable = trainable;
  ++decisions().count;
  if (!state_->group) return;
  state_->group->is_laid_out = false;
  ++state_->group->layouts;  // optimizers follow at once
}

std::string ParameterState::called() const {
  return name.empty() ? concat("parameter of shape ", shape) : concat("parameter '", name, "'");
}

std::string ParameterState::without_memory() const {
  return called() +
         " has no memory yet; register it and its module, and call materialize on the model first";
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

Tensor Parameter::shard() const { return read_only(rows_of(*state_of(*this)), state_); }
Tensor Parameter::grad() const { return gradient_of(*state_of(*this)); }

void Parameter::edit(const std::function<void(const Tensor& rows)>& f) const {
  const Tensor rows = rows_of(*state_of(*this));
  FlatGroup& group = *state_->group;
  state_->is_set = true;
  group.await_readers();
  ++rows.storage()->version;  // for what saved them where they are whole
  rows.storage()->last_writer = kEdit.c_str();
  try {
    f(Lent(rows, kEdit).tensor());
  } catch (...) {
    group.mark_edited();
    throw;
  }
  group.mark_edited();
}

void Parameter::assign(const Tensor& values) const {
  const Shape local = spec().local_shape();
  TESSERA_EXPECT(values.shape() == local && is_floating(values.dtype()), "parameter '", name(),
                 "' is assigned ", values.shape(), " of ", values.dtype(),
                 "; this rank's rows are ", local, ", of a floating dtype");
  edit([&](const Tensor& rows) { raw::copy_into(rows, values); });
}

void materialize_whole(const std::string& name, const std::vector<Parameter>& parameters,
                       const Device& device) {
  constexpr std::int64_t kEnough = std::int64_t{16} << 20;  // bytes of a group
  const auto make = [&](const std::vector<std::shared_ptr<ParameterState>>& states) {
    const auto group = FlatGroup::make(name, states, device);
    const auto sinks = std::make_shared<LocalGradient>(group);
    for (const auto& state : states) {
      state->sinks = sinks;
      state->compute_dtype = state->dtype;
      state->window = group->values.storage();
      state->window_offset_bytes = state->flat_entry().offset * state->element_bytes();
    }
  };
  for (const Parameter& p : parameters)
    TESSERA_EXPECT(p.device().is_meta(), "materialize: parameter '", p.name(),
                   "' already has memory");
  struct Pending {
    std::vector<std::shared_ptr<ParameterState>> states;
    std::int64_t bytes = 0;
  };
  std::map<DType, Pending> pending;
  for (const Parameter& p : parameters) {
    const std::shared_ptr<ParameterState>& state = state_of(p);
    Pending& of = pending[state->dtype];
    of.states.push_back(state);
    of.bytes = checked_add(of.bytes, checked_mul(p.shape().numel(), state->element_bytes()));
    if (of.bytes >= kEnough) make(std::exchange(of, {}).states);
  }
  for (const auto& [dtype, of] : pending)
    if (!of.states.empty()) make(of.states);
}

}  // namespace tessera
