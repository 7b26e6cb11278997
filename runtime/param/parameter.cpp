#include "tessera/param/parameter.hpp"

#include <utility>

#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/lent_tensor.hpp"
#include "tessera/autograd/rows_in_8_bits.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/detail/device/captured_work.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tessera/param/row_parts.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

// The full tensor, without history.
Tensor view_of(const std::shared_ptr<ParameterState>& state) {
  Tensor full =
      Tensor::wrap(state->window, state->shape, state->compute_dtype, state->window_offset_bytes);
  if (state->spec.dim > 0) full = full.view(state->shape, state->spec.strides(state->shape), 0);
  return read_only(std::move(full), state);
}

const std::string kEdit = "Parameter::edit";

}  // namespace

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
  TESSERA_EXPECT(
      !state_of(*this)->is_streamed, "parameter '", state_->name, "' of unit '", *state_->unit,
      "' is streamed, so only one slice of it is there at a time; call the root first, "
      "root.call([&] { ... }), and use the parameter by for_each_slice in a module that streams it",
      state_->streaming_modules());
  return value_of(state_);
}

Tensor value_of(const std::shared_ptr<ParameterState>& state) {
  TESSERA_EXPECT(state->window != nullptr, state->without_memory());
  TESSERA_EXPECT(!state->window->is_closed(), "parameter '", state->name, "' of unit '",
                 *state->unit,
                 "' was used while the unit is closed; use it inside a call of the module that "
                 "fully_shard was given: module.call([&] { ... })",
                 state->names > 1 ? ", or make one unit around all modules that share it" : "");
  TESSERA_EXPECT(
      !state->unit || state->window->version == state->group->version, "parameter '", state->name,
      "' of unit '", *state->unit,
      "' was updated since the unit was opened; call unshard again, or use it in a call");
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

// --- how it is cut, stored and gathered, which is said before it has memory ---

DType Parameter::dtype() const { return state_of(*this)->dtype; }
void Parameter::set_dtype(DType dtype) const {
  TESSERA_EXPECT(!state_of(*this)->group, "set_dtype: ", state_->called(),
                 " has memory; call it before materialize");
  TESSERA_EXPECT(is_floating(dtype) && dtype != f64, "set_dtype: ", state_->called(), " in ", dtype,
                 "; expected f32, bf16, f16, e4m3 or e5m2");
  TESSERA_EXPECT(dtype == f32 || !state_->transform, "set_dtype: ", state_->called(),
                 " has a gather transform, which takes f32 only; leave one of the two out");
  TESSERA_EXPECT(dtype == f32 || !trainable(), "set_dtype: ", state_->called(),
                 " is trainable, and trained parameters are stored in f32; freeze it first");
  state_->dtype = dtype;
}

void Parameter::set_block_rows(std::int64_t rows) const {
  const Shape& shape = this->shape();
  TESSERA_EXPECT(!unit(), "set_block_rows: parameter '", name(), "' belongs to unit '",
                 *state_->unit, "'; call it before fully_shard");
  TESSERA_EXPECT(rows >= 0 && rows <= (shape.ndim() > 0 ? shape[0] : 0),
                 "set_block_rows: blocks of ", rows, " rows for ", state_->described(),
                 "; give no more than its rows, or 0 for even shards");
  TESSERA_EXPECT(rows == 0 || !state_->transform, "set_block_rows: ", state_->described(),
                 " has a gather transform, which cuts it evenly; leave one of the two out");
  state_->block_rows = rows;
}

void Parameter::set_gather_transform(std::shared_ptr<const GatherTransform> transform) const {
  TESSERA_EXPECT(!state_of(*this)->group, "set_gather_transform: ", state_->called(),
                 " has memory; call it before materialize");
  TESSERA_EXPECT(!transform || state_->dtype == f32, "set_gather_transform: ", state_->called(),
                 " is stored in ", state_->dtype,
                 ", and a transform takes f32 only; store it in f32");
  TESSERA_EXPECT(!transform || state_->block_rows == 0,
                 "set_gather_transform: ", state_->described(), " is sharded by blocks of ",
                 state_->block_rows,
                 " rows, but a transform needs even shards; leave one of the two out");
  TESSERA_EXPECT(!transform || spec().dim == 0, "set_gather_transform: ", state_->described(),
                 " is sharded along dimension ", spec().dim,
                 ", but a transform needs rows; leave one of the two out");
  TESSERA_EXPECT(!transform || !transform->parts(spec()).empty(), "set_gather_transform: '",
                 transform->name(), "' has no parts for ", state_->described(),
                 "; give at least one array that travels");
  state_->transform = std::move(transform);
}

void Parameter::draw(const Tensor& out, const RowRange& of,
                     std::span<const std::uint64_t> keys) const {
  const std::vector<RowPart>& parts = row_parts();
  TESSERA_EXPECT(keys.size() == std::max<std::size_t>(parts.size(), 1), "initialize: ", keys.size(),
                 " keys for ", state_->called(), "; expected one, or one for each row part");
  const std::int64_t row = shape().ndim() == 0 ? 1 : shape().with(0, 1).numel();
  RowRange part;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    part = {part.end, part.end + parts[i].rows};
    const RowRange to = within(of, part), from = within(part, of);
    state_->initializer.fill(raw::slice(out, 0, to.begin, to.end), shape().with(0, part.size()),
                             keys[i], from.begin * row);
  }
  if (parts.empty()) state_->initializer.fill(out, shape(), keys[0], of.begin * row);
}

void Parameter::initialize(std::span<const std::uint64_t> keys) const {
  edit([&](const Tensor& rows) {
    if (spec().dim == 0) return draw(rows, spec().owned(), keys);
    const Tensor whole = Tensor::empty(shape(), rows.dtype(), rows.device());
    draw(whole, {0, shape()[0]}, keys);
    raw::copy_into(rows, tessera::rows_of(whole, spec()));
  });
}

// A row that is cut has one scale all the same.
void Parameter::initialize(std::span<const std::uint64_t> keys, const Parameter& scales) const {
  const auto put = [&](const Parameter& to, Tensor RowsIn8Bits::* made) {
    const ShardSpec& spec = to.spec();
    to.edit([&](const Tensor& rows) {
      const RowRange of = spec.dim == 0 ? spec.owned() : RowRange{0, shape()[0]};
      const Tensor drawn = Tensor::empty(shape().with(0, of.size()), f32, rows.device());
      draw(drawn, of, keys);
      const Tensor encoded = encode_rows(drawn).*made;
      raw::copy_into(rows, spec.dim == 0 ? encoded : tessera::rows_of(encoded, spec));
    });
  };
  put(*this, &RowsIn8Bits::codes);
  put(scales, &RowsIn8Bits::scales);
}

void Parameter::set_row_parts(std::vector<RowPart> parts) const {
  ParameterState& state = *state_of(*this);
  std::int64_t rows = 0;
  for (const RowPart& part : parts) {
    TESSERA_EXPECT(part.rows > 0 && !part.name.empty(), "set_row_parts: '", part.name, "' of ",
                   part.rows, " rows in ", state.called(), "; expected a name and 1 row or more");
    rows = checked_add(rows, part.rows);
  }
  TESSERA_EXPECT(parts.empty() || (shape().ndim() > 0 && rows == shape()[0]),
                 "set_row_parts: ", state.called(), " is ", shape(), ", its parts have ", rows,
                 " rows; give parts of all its rows, or none");
  state.row_parts = std::move(parts);
}
const std::vector<RowPart>& Parameter::row_parts() const { return state_of(*this)->row_parts; }

// --- what a program changes between steps: its values, and whether it is trained ---

void Parameter::edit(const std::function<void(const Tensor& rows)>& f) const {
  const Tensor rows = state_of(*this)->rows();
  FlatGroup& group = *state_->group;
  state_->is_set = true;
  group.await_readers();
  ++rows.storage()->version;  // for what saved them where they are whole
  rows.storage()->last_writer = kEdit.c_str();
  try {
    f(LentTensor(rows, kEdit).tensor());
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

void Parameter::set_trainable(bool trainable) const {
  if (this->trainable() == trainable) return;
  TESSERA_EXPECT(!autograd::in_backward() && !autograd::in_call(), "set_trainable: parameter '",
                 state_->name,
                 "' can't be frozen or thawed in a call or a backward pass; do it between steps");
  TESSERA_EXPECT(
      !trainable || state_->dtype == f32, "set_trainable: ", state_->called(), " is stored in ",
      state_->dtype,
      ", but trained parameters are stored in f32; call set_dtype(f32) before materialize");
  if (state_->group) state_->drop_gradient();  // also what has come while it was frozen
  state_->trainable = trainable;
  ++decisions().count;
  if (!state_->group) return;
  state_->group->is_laid_out = false;
  ++state_->group->layouts;  // optimizers follow at once
}

// --- what modules do with it: they name it, as errors do, and say who has it and who streams it
// ---

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

bool Parameter::is_shared() const { return state_of(*this)->modules > 1; }
bool Parameter::is_streamed() const {
  return unit() ? state_->is_streamed : state_->may_be_streamed();
}

}  // namespace tessera
