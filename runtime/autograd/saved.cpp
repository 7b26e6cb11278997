#include "tessera/autograd/saved.hpp"

#include "runtime/autograd/kept_results.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::autograd {

Saved::Saved(const Tensor& tensor) {
  if (!tensor.defined()) return;
  if (!tensor.device().is_meta()) tensor.device().context().submit_held();
  if (KeptResults* const kept = KeptResults::current()) kept->note_saved();
  tensor_ = tensor.view(tensor.shape(), tensor.strides(), 0);
  version_ = tensor_.storage()->version;
  ++tensor_.storage()->saved;
}
Saved::Saved(const Saved& other) : tensor_(other.tensor_), version_(other.version_) {
  if (tensor_.defined()) ++tensor_.storage()->saved;
}
Saved::~Saved() {
  if (tensor_.defined()) --tensor_.storage()->saved;
}

const Tensor& Saved::get() const {
  if (tensor_.defined() && tensor_.storage()->is_closed())
    throw ContractError(concat(
        "backward: a parameter of unit '", *tensor_.storage()->unit, "', of shape ",
        tensor_.shape(),
        ", is read while the unit is closed; use it in a call of its module, and let "
        "reads_parameters_in_backward() and set_unshard_in_backward say that backward reads it"));
  if (!tensor_.defined() || tensor_.storage()->version == version_) return tensor_;
  const Storage& storage = *tensor_.storage();
  if (storage.unit)
    throw ContractError(concat("backward: the parameters of unit '", *storage.unit,
                               "' were updated since forward; run backward first"));
  throw ContractError(concat("backward: a tensor of shape ", tensor_.shape(), " was written by '",
                             storage.last_writer,
                             "' since forward; run backward first, or write to a copy"));
}

Tensor Saved::extract() {
  Tensor tensor = get();
  *this = {};
  return tensor;
}

}  // namespace tessera::autograd
