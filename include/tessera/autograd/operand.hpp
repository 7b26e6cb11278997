// Operands of operators, by which errors of `a + b` name the line where it stands.
#pragma once

#include <concepts>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

// The first operand of an operator, and the line of the expression. An operator can have no
// defaulted parameters, but a conversion to its operand's type can.
struct Operand {
  Tensor tensor;
  Caller at;

  template <std::convertible_to<Tensor> T>
  Operand(const T& operand, Caller line = Caller::current()) : tensor(operand), at(line) {}
};

}  // namespace tessera
