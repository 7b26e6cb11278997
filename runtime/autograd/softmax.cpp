// Softmax and its logarithm over any dimension: over the last one of a transposed view.
#include "runtime/autograd/operands.hpp"
#include "tessera/autograd/ops.hpp"

namespace tessera {

using autograd::as_scalar;
using autograd::Gradients;
using autograd::record;
using autograd::Saved;
using autograd::widened;
using raw::Binary;
using raw::binary;

namespace {

Tensor dim_last(const Tensor& x, int dim) {
  return dim == x.ndim() - 1 ? x : raw::transpose(x, dim, -1);
}
Tensor over_rows(raw::Reduction op, const Tensor& x) {
  return raw::reduce(op, x, -1, raw::KeepDim::yes);
}

void check_floating(const char* name, const Tensor& x) {
  TESSERA_EXPECT(is_floating(x.dtype()), name, ": needs a floating tensor, got ", x.shape(), " of ",
                 x.dtype());
}

}  // namespace

Tensor softmax(const Tensor& x, int dim, Caller at) {
  const CallSite site("softmax", at);
  check_floating("softmax", x);
  if (x.ndim() == 0) return as_scalar(x, [=](const Tensor& t) { return softmax(t, dim); });
  const int d = normalize_dim(dim, x.ndim());
  const Tensor y = raw::softmax(dim_last(x, d));
  return record("softmax", {x}, dim_last(y, d), [y = Saved(y), d](const Tensor& g, Gradients& out) {
    out.set(0, dim_last(raw::softmax_backward(y.get(), dim_last(g, d)), d));
  });
}

// x - m - log(sum(e^(x - m))), m the row's largest.
Tensor log_softmax(const Tensor& x, int dim, Caller at) {
  const CallSite site("log_softmax", at);
  check_floating("log_softmax", x);
  if (x.ndim() == 0) return as_scalar(x, [=](const Tensor& t) { return log_softmax(t, dim); });
  const int d = normalize_dim(dim, x.ndim());
  Tensor y = Tensor::empty(dim_last(x, d).shape(), x.dtype(), x.device());
  if (x.numel() > 0) {
    y = widened(dim_last(x, d));
    y = binary(Binary::sub, y, over_rows(raw::Reduction::max, y));
    const Tensor sum = over_rows(raw::Reduction::sum, raw::exp(y));
    y = raw::cast(binary(Binary::sub, y, raw::log(sum)), x.dtype());
  }
  return record("log_softmax", {x}, dim_last(y, d),
                [y = Saved(y), d](const Tensor& gradient, Gradients& out) {
                  const Tensor g = widened(dim_last(gradient, d));
                  const Tensor share =
                      raw::mul(raw::exp(widened(y.get())), over_rows(raw::Reduction::sum, g));
                  out.set(0,
                          dim_last(raw::cast(binary(Binary::sub, g, share), gradient.dtype()), d));
                });
}

}  // namespace tessera
