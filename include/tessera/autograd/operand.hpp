// Why errors of `a + b` name the line where it stands.
#pragma once

#include <concepts>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

// The first operand of an operator, and the line of the expression: an operator has no defaulted
// parameters, but a conversion to its operand's type has.
struct Operand {
  Tensor tensor;
  Caller at;

  template <std::convertible_to<Tensor> T>
  Operand(const T& operand, Caller line = Caller::current()) : tensor(operand), at(line) {}
};

}  // namespace tessera
