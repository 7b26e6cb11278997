// A table of vectors, looked up by id: tokens and learned positions.
#pragma once

#include "tessera/nn/linear.hpp"

namespace tessera::nn {

class Embedding : public Module {
 public:
  Embedding(std::int64_t count, std::int64_t dim, const Device& device = Device::meta());

  // ids [...] in [0, count), i32 or i64 -> [..., dim] of the weight's dtype. Any other id gives a
  // row of NaN.
  Tensor operator()(const Tensor& ids, Caller at = Caller::current());

  // x [..., n, dim] + the first n rows: learned positions. Where the table lies in one slice, and
  // nobody looks at what is looked up, nothing is.
  Tensor add_positions(const Tensor& x, Caller at = Caller::current());

  // The gradient of a row goes to its id.
  bool reads_parameters_in_backward() const override { return false; }

  Parameter weight;  // [count, dim], normal
};

}  // namespace tessera::nn
