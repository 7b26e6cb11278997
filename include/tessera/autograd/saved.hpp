// What an operation keeps of a tensor from forward to backward.
#pragma once

#include <cstdint>
#include <utility>

#include "tessera/tensor/tensor.hpp"

namespace tessera::autograd {

// A tensor kept for backward, which nobody may write in between. Of a sharded parameter it keeps
// the view only; see Note [Windows].
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
  // Throws: ContractError where an operation has written it since, as an optimizer does.
  const Tensor& get() const;
  // The same, and lets go of it: for a function that does not run again
  // (Gradients::graph_is_retained) and has no other use for its bytes.
  Tensor extract();

 private:
  Tensor tensor_;
  std::uint64_t version_ = 0;
};

}  // namespace tessera::autograd
