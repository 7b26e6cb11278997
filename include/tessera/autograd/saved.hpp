// Tensors that an operation keeps from forward to backward.
#pragma once

#include <cstdint>
#include <utility>

#include "tessera/tensor/tensor.hpp"

namespace tessera::autograd {

// A tensor kept for backward. Nobody may write it in between. A sharded parameter is kept as a view
// without its bytes; see Note [Windows].
class Saved {
 public:
  Saved() = default;
  explicit Saved(const Tensor& tensor);
  Saved(const Saved& other);
  Saved(Saved&& other) noexcept
      : tensor_(std::exchange(other.tensor_, {})), version_(other.version_) {}
  Saved& operator=(Saved other) noexcept {
    std::swap(tensor_, other.tensor_);
    std::swap(version_, other.version_);
    return *this;
  }
  ~Saved();

  // The tensor without history.
  // Throws: ContractError if an operation has written it since, for example an optimizer.
  const Tensor& get() const;
  // Returns the tensor and lets go of it. It is for a function that does not run again
  // (Gradients::graph_is_retained) and wants to reuse the bytes.
  Tensor extract();

 private:
  Tensor tensor_;
  std::uint64_t version_ = 0;
};

}  // namespace tessera::autograd
