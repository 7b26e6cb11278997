// What a program changes of a parameter between steps: its values, and whether it is trained.
#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/lent.hpp"
#include "tessera/device/captured_work.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

const std::string kEdit = "Parameter::edit";

}  // namespace

void Parameter::edit(const std::function<void(const Tensor& rows)>& f) const {
  const Tensor rows = state_of(*this)->rows();
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
  if (const Tensor gradient = state_->gradient(); gradient.defined()) {  // none from here on
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

}  // namespace tessera
