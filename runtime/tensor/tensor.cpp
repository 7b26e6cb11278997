#include "tessera/tensor/tensor.hpp"

#include "tessera/device/device_context.hpp"

namespace tessera {

Tensor Tensor::wrap(std::shared_ptr<Storage> storage, const Shape& shape, DType dtype,
                    std::int64_t offset_bytes) {
  Tensor out;
  out.impl_ =
      std::make_shared<Impl>(std::move(storage), offset_bytes, shape, shape.strides(), dtype);
  return out;
}

Tensor Tensor::empty(const Shape& shape, DType dtype, const Device& device, Caller at) {
  const CallSite site("empty", at);
  const std::int64_t bytes =
      checked_mul(shape.numel(), static_cast<std::int64_t>(size_bytes(dtype)));
  return wrap(Storage::owned(device, bytes), shape, dtype);
}

bool Tensor::is_contiguous() const {
  const std::int64_t *const sizes = shape().begin(), *const strides = this->strides().begin();
  std::int64_t step = 1;
  for (int d = ndim() - 1; d >= 0; --d) {
    if (sizes[d] == 0) return true;
    if (sizes[d] != 1 && strides[d] != step) return false;
    step *= sizes[d];
  }
  return true;
}

Tensor Tensor::view(const Shape& shape, const Shape& strides, std::int64_t offset) const {
  Tensor out;
  out.impl_ = std::make_shared<Impl>(
      impl().storage, impl().offset_bytes + offset * static_cast<std::int64_t>(size_bytes(dtype())),
      shape, strides, dtype(), autograd::Edge(), impl().parameter);
  return out;
}

Tensor Tensor::read_only(std::shared_ptr<const std::string> parameter) && {
  Tensor out = impl_.use_count() > 1 ? view(shape(), strides(), 0) : std::move(*this);
  out.impl_->parameter = std::move(parameter);
  return out;
}

std::byte* Tensor::data() const {
  const Storage& s = *impl().storage;
  TESSERA_EXPECT(!s.is_closed(), "a parameter of unit '", *s.unit, "', of shape ", shape(),
                 ", was used while the unit is closed; ", s.remedy);
  return s.data == nullptr ? nullptr : s.data + impl().offset_bytes;
}

bool Tensor::is_exclusive() const {
  if (!device().is_meta()) device().context().submit_held();  // it holds its operands
  return impl_.use_count() == 1 && impl_->storage.use_count() == 1 && !impl_->storage->is_lent;
}

Access Tensor::access(AccessMode mode) const {
  const std::int64_t* stride = strides().begin();
  std::int64_t last = 0;
  for (const std::int64_t size : shape()) last += (size - 1) * *stride++;
  return access(mode, 0, last + 1);
}

Access Tensor::access(AccessMode mode, std::int64_t first, std::int64_t numel) const {
  const Impl& of = impl();
  Storage& storage = *of.storage;
  const auto element = static_cast<std::int64_t>(size_bytes(of.dtype));
  std::byte* const begin = data() + first * element;
  if (mode == AccessMode::write) {
    TESSERA_EXPECT(!of.parameter, "parameter '", *of.parameter,
                   "' is read-only here; write by Parameter::edit or assign");
    TESSERA_EXPECT(!storage.is_read_only,
                   "the memory of this tensor was lent read-only; write to a copy of it");
    ++storage.version;
  }
  return {storage.use, begin, begin + numel * element, mode};
}

}  // namespace tessera
