#include "tessera/nn/buffer.hpp"

#include <cstddef>
#include <utility>
#include <vector>

#include "tessera/base/philox.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::nn {

Buffer::Buffer(const Shape& shape, Initializer initializer, DType dtype)
    : state_(std::make_shared<State>()) {
  shape.numel();  // checks
  state_->shape = shape;
  state_->initializer = std::move(initializer);
  state_->dtype = dtype;
}

Tensor Buffer::value() const {
  TESSERA_EXPECT(state_ != nullptr, "an undefined buffer was used");
  TESSERA_EXPECT(state_->values.defined(), "buffer '", state_->name,
                 "' has no memory yet; call materialize on the model first");
  const Tensor& values = state_->values;
  return values.view(values.shape(), values.strides(), 0).read_only({state_, &state_->name});
}

void Buffer::assign(const Tensor& values) const {
  (void)value();  // it has memory
  TESSERA_EXPECT(
      values.shape() == shape() &&
          (values.dtype() == dtype() || (is_floating(values.dtype()) && is_floating(dtype()))),
      "buffer '", name(), "' is assigned ", values.shape(), " of ", values.dtype(), "; expected ",
      shape(), " of ", dtype());
  replace([&](const Tensor& copy) { raw::copy_into(copy, values); });
}

void Buffer::replace(const std::function<void(const Tensor& values)>& fill) const {
  const Device device = value().device();
  const OwnerGuard owner(device, "buffers");
  const Tensor values = Tensor::empty(shape(), dtype(), device);
  fill(values);
  state_->values = values;
}

void Buffer::initialize(std::uint64_t key, const Device& device) const {
  const OwnerGuard owner(device, "buffers");
  const Tensor values = Tensor::empty(shape(), dtype(), device);
  state_->initializer.fill(values, shape(), key, 0);
  state_->values = values;
}

void Buffer::materialize(const Device& device) const {
  const Tensor& old = state_->values;
  if (!old.defined()) return initialize(key_of(Seed{}, name()), device);
  if (old.device() == device) return;
  std::vector<std::byte> bytes(static_cast<std::size_t>(old.storage()->bytes));
  old.to_bytes(bytes);
  const OwnerGuard owner(device, "buffers");
  state_->values = Tensor::from_bytes(bytes, shape(), dtype(), device);
}

}  // namespace tessera::nn
