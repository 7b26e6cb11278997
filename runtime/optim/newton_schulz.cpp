#include "runtime/optim/newton_schulz.hpp"

#include "tessera/tensor/ops.hpp"

namespace tessera::optim {
namespace {

// The norm is summed in f64, where no square of an f32 overflows.
Tensor normalised(const Tensor& x, double eps) {
  const Tensor squares = Tensor::empty({}, f64, x.device());
  raw::sumsq_into(squares, x, raw::Accumulate::no);
  const Tensor norm = raw::binary(raw::Binary::max, raw::sqrt(squares), eps);
  return raw::binary(raw::Binary::div, x, raw::cast(norm, f32));
}

Tensor copy_of(const Tensor& x) {
  const Tensor copy = Tensor::empty(x.shape(), x.dtype(), x.device());
  raw::copy_into(copy, x);
  return copy;
}

}  // namespace

Tensor orthogonalised(const Tensor& x, const NewtonSchulz& how) {
  constexpr auto kNo = raw::Transpose::no, kYes = raw::Transpose::yes;
  const auto [a, b, c] = how.coefficients;
  const bool is_tall = x.size(0) > x.size(1);  // the smaller Gram matrix is that of the columns
  Tensor now = raw::cast(normalised(x, how.eps), how.dtype);
  for (int step = 0; step < how.steps; ++step) {
    const Tensor gram =
        is_tall ? raw::matmul(now, now, kYes, kNo) : raw::matmul(now, now, kNo, kYes);
    const Tensor polynomial = copy_of(gram), next = copy_of(now);
    raw::matmul_into(polynomial, gram, gram, kNo, kNo, c, b);
    if (is_tall)
      raw::matmul_into(next, now, polynomial, kNo, kNo, 1, a);
    else
      raw::matmul_into(next, polynomial, now, kNo, kNo, 1, a);
    now = next;
  }
  return now;
}

}  // namespace tessera::optim
