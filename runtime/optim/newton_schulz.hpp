// The orthogonalisation of a matrix by Newton and Schulz's iteration with a quintic polynomial.
#pragma once

#include <array>

#include "tessera/tensor/tensor.hpp"

namespace tessera::optim {

struct NewtonSchulz {
  std::array<double, 3> coefficients{};  // a, b, c
  int steps = 0;
  double eps = 0;
  DType dtype = DType::f32;  // in which it is iterated: f32 or 16 bits, which sum in f32
};

// X = x / max(|x|, eps), with the root of the sum of squares; then `steps` times
//
//   A = X X^T    X = a X + (b A + c A A) X        X^T X and from the right, where x is tall
//
// which takes each singular value s to a s + b s^3 + c s^5. Its bits depend on x alone.
// x: [m, n] of f32, contiguous and not empty; returns [m, n] of `dtype`.
// Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
Tensor orthogonalised(const Tensor& x, const NewtonSchulz& how);

}  // namespace tessera::optim
