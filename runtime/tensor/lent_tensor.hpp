// Tensors that are lent to a callback. A borrower may keep one; used later, it says who lent it.
#pragma once

#include <memory>
#include <string>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

// Another handle of the bytes of a tensor that leaves none out, closed when this goes.
class LentTensor {
 public:
  // `lender` is named in errors and outlives what is kept.
  LentTensor(const Tensor& of, const std::string& lender)
      : of_(of),
        storage_(Storage::window(
            of.device(), checked_mul(of.numel(), static_cast<std::int64_t>(size_bytes(of.dtype()))),
            lender)) {
    storage_->data = of.data();
    storage_->use = of.storage()->use;
    storage_->remedy = "it is lent for the callback only: copy what you keep, as by to_vector";
  }
  LentTensor(const LentTensor&) = delete;
  LentTensor& operator=(const LentTensor&) = delete;
  ~LentTensor() { storage_->data = nullptr; }

  Tensor tensor() const {
    return Tensor::wrap(storage_, of_.shape(), of_.dtype()).view(of_.shape(), of_.strides(), 0);
  }

 private:
  Tensor of_;
  std::shared_ptr<Storage> storage_;
};

}  // namespace tessera
