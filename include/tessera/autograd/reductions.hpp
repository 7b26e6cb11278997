// Sums, statistics and extremes over one dimension, several, or all; orders along one. A reduced
// dimension is dropped, or kept with size 1.
#pragma once

#include "tessera/autograd/node.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

using raw::KeepDim;
Tensor sum(const Tensor& x, const Dims& dims = {}, KeepDim keep = KeepDim::no,
           Caller at = Caller::current());
Tensor mean(const Tensor& x, const Dims& dims = {}, KeepDim keep = KeepDim::no,
            Caller at = Caller::current());
// The product, by halves, in log2(n) launches. It is i64 for integers and boolean, as a sum is.
Tensor prod(const Tensor& x, const Dims& dims = {}, KeepDim keep = KeepDim::no,
            Caller at = Caller::current());
// var: the mean of (x - mean)^2, with n - correction in place of n. stddev: its root, whose
// gradient is 0 where it is 0.
Tensor var(const Tensor& x, const Dims& dims = {}, double correction = 1,
           KeepDim keep = KeepDim::no, Caller at = Caller::current());
Tensor stddev(const Tensor& x, const Dims& dims = {}, double correction = 1,
              KeepDim keep = KeepDim::no, Caller at = Caller::current());
// sqrt of the sum of squares; its gradient is 0 where it is 0.
Tensor norm(const Tensor& x, const Dims& dims = {}, KeepDim keep = KeepDim::no,
            Caller at = Caller::current());
// log of the sum of exp(x), without overflow; floating.
Tensor logsumexp(const Tensor& x, const Dims& dims = {}, KeepDim keep = KeepDim::no,
                 Caller at = Caller::current());
// any: whether an element is not 0. all: whether no element is 0. Both are boolean, without
// history.
Tensor any(const Tensor& x, const Dims& dims = {}, KeepDim keep = KeepDim::no,
           Caller at = Caller::current());
Tensor all(const Tensor& x, const Dims& dims = {}, KeepDim keep = KeepDim::no,
           Caller at = Caller::current());

// --- extremes: NaN wins; of no element they throw ContractError --- Equal ones share the gradient.
Tensor amax(const Tensor& x, const Dims& dims = {}, KeepDim keep = KeepDim::no,
            Caller at = Caller::current());
Tensor amin(const Tensor& x, const Dims& dims = {}, KeepDim keep = KeepDim::no,
            Caller at = Caller::current());
Tensor max(const Tensor& x, Caller at = Caller::current());
Tensor min(const Tensor& x, Caller at = Caller::current());
// The gradient goes to the first of equal ones.
Tensor max(const Tensor& x, int dim, KeepDim keep = KeepDim::no, Caller at = Caller::current());
Tensor min(const Tensor& x, int dim, KeepDim keep = KeepDim::no, Caller at = Caller::current());
// The i64 position of the first of equal ones, along dim or in row-major order.
Tensor argmax(const Tensor& x, int dim, KeepDim keep = KeepDim::no, Caller at = Caller::current());
Tensor argmin(const Tensor& x, int dim, KeepDim keep = KeepDim::no, Caller at = Caller::current());
Tensor argmax(const Tensor& x, Caller at = Caller::current());
Tensor argmin(const Tensor& x, Caller at = Caller::current());
struct ValuesAndIndices {
  Tensor values, indices;  // the chosen elements, and their i64 positions along the dimension
};
ValuesAndIndices max_with_index(const Tensor& x, int dim, KeepDim keep = KeepDim::no,
                                Caller at = Caller::current());
ValuesAndIndices min_with_index(const Tensor& x, int dim, KeepDim keep = KeepDim::no,
                                Caller at = Caller::current());

// --- orders: NaN is largest, equal elements keep their order ---
Tensor cumsum(const Tensor& x, int dim,
              Caller at = Caller::current());  // i64 of integers and boolean
Tensor argsort(const Tensor& x, int dim = -1, Order order = Order::ascending,
               Caller at = Caller::current());
ValuesAndIndices sort(const Tensor& x, int dim = -1, Order order = Order::ascending,
                      Caller at = Caller::current());
// The first k in that order, so the largest by default.
ValuesAndIndices topk(const Tensor& x, std::int64_t k, int dim = -1,
                      Order order = Order::descending, Caller at = Caller::current());

}  // namespace tessera
