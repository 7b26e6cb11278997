// Inputs of linear_fp8 that are rounded where they are made, by a norm or SwiGLU, and lie nowhere
// else: what the tape has of them is their plain codes.
#pragma once

#include "runtime/tensor/fp8.hpp"
#include "tessera/autograd/fp8.hpp"

namespace tessera::autograd {

// What the recipe says of x and of gradients.
inline kernels::Scaling scaling_of_rows(Fp8Recipe recipe) {
  return recipe == Fp8Recipe::tensorwise ? kernels::Scaling::tensor : kernels::Scaling::rows;
}

// Before x is made: whether rows like these can be rounded where they are.
// Throws: ContractError where not.
void expect_rounded(const char* name, const Tensor& like);

// The codes of x, of this shape, without history; both forms and their scales stay in the innermost
// SharedFp8Input of this thread.
Tensor rounded_input(const tessera::detail::NormOf& x, const Shape& shape, Fp8Recipe recipe);
Tensor rounded_input(const tessera::detail::SwigluOf& x, const Shape& shape, Fp8Recipe recipe);

}  // namespace tessera::autograd
