// Derivatives of sums, statistics and extremes, and of orders along a dimension.
#include "tessera/autograd/reductions.hpp"

#include "runtime/autograd/operands.hpp"
#include "tessera/autograd/ops.hpp"

namespace tessera {

using autograd::as_scalar;
using autograd::Gradients;
using autograd::record;
using autograd::Saved;
using raw::Binary;
using raw::KeepDim;
using raw::Reduction;

namespace {

// What a reduction of `shape` over `mask` has lost, put back: g with size 1 there, or repeated.
Tensor kept(const Tensor& g, const Shape& shape, unsigned mask) {
  return raw::reshape(g, kept_shape(shape, mask));
}
Tensor spread(const Tensor& g, const Shape& shape, unsigned mask) {
  return raw::expand(kept(g, shape, mask), shape);
}

// How many elements one result has seen.
double count_of(const Shape& shape, unsigned mask) {
  double count = 1;
  for (int d = 0; d < shape.ndim(); ++d)
    if ((mask >> d & 1u) != 0) count *= static_cast<double>(shape[d]);
  return count;
}

// g / y where y is not 0, else 0.
Tensor quotient_or_zero(const Tensor& g, const Tensor& y) {
  return raw::where(y == 0, Tensor::zeros({}, g.dtype(), g.device()),
                    raw::binary(Binary::div, g, y));
}

}  // namespace

Tensor sum(const Tensor& x, const Dims& dims, KeepDim keep, Caller at) {
  const CallSite site("sum", at);
  return record("sum", {x}, raw::reduce(Reduction::sum, x, dims, keep),
                [shape = x.shape(), mask = dims.mask(x.ndim())](const Tensor& g, Gradients& out) {
                  out.set(0, spread(g, shape, mask));
                });
}
Tensor mean(const Tensor& x, const Dims& dims, KeepDim keep, Caller at) {
  const CallSite site("mean", at);
  return record("mean", {x}, raw::reduce(Reduction::mean, x, dims, keep),
                [shape = x.shape(), mask = dims.mask(x.ndim())](const Tensor& g, Gradients& out) {
                  out.set(0, spread(raw::mul(g, 1 / count_of(shape, mask)), shape, mask));
                });
}

// Halves are multiplied until one element is left, so that the gradient of a product with a 0 in it
// is that of products, too.
Tensor prod(const Tensor& x, const Dims& dims, KeepDim keep, Caller at) {
  const CallSite site("prod", at);
  const unsigned mask = dims.mask(x.ndim());
  const Shape shape =
      keep == KeepDim::yes ? kept_shape(x.shape(), mask) : dropped_shape(x.shape(), mask);
  std::vector<int> order;
  for (const unsigned wanted : {1u, 0u})
    for (int d = 0; d < x.ndim(); ++d)
      if ((mask >> d & 1u) == wanted) order.push_back(d);
  std::int64_t n = 1;
  for (int d = 0; d < x.ndim(); ++d)
    if ((mask >> d & 1u) != 0) n *= x.shape()[d];
  if (n == 0) return add(sum(x, dims, keep), 1);
  Tensor y = reshape(permute(is_floating(x.dtype()) ? x : cast(x, i64), order), {n, shape.numel()});
  for (; n > 1; n -= n / 2) {
    const Tensor halves = mul(slice(y, 0, 0, n / 2), slice(y, 0, n / 2, n - n % 2));
    y = n % 2 == 0 ? halves : cat({halves, slice(y, 0, n - 1, n)}, 0);
  }
  return reshape(y, shape);
}

Tensor var(const Tensor& x, const Dims& dims, double correction, KeepDim keep, Caller at) {
  const CallSite site("var", at);
  const double n = count_of(x.shape(), dims.mask(x.ndim()));
  const Tensor centred = sub(x, mean(x, dims, KeepDim::yes));
  return mul(sum(square(centred), dims, keep), 1 / std::max(n - correction, 0.0));
}
Tensor stddev(const Tensor& x, const Dims& dims, double correction, KeepDim keep, Caller at) {
  const CallSite site("stddev", at);
  const Tensor squared = var(x, dims, correction, keep);
  Tensor y = raw::sqrt(squared);
  return record("stddev", {squared}, y, [y = Saved(y)](const Tensor& g, Gradients& out) {
    out.set(0, raw::mul(quotient_or_zero(g, y.get()), 0.5));
  });
}
Tensor norm(const Tensor& x, const Dims& dims, KeepDim keep, Caller at) {
  const CallSite site("norm", at);
  Tensor y = raw::sqrt(raw::reduce(Reduction::sumsq, x, dims, keep));
  return record(
      "norm", {x}, y,
      [x = Saved(x), y = Saved(y), mask = dims.mask(x.ndim())](const Tensor& g, Gradients& out) {
        const Shape& shape = x.get().shape();
        out.set(0, raw::mul(x.get(), kept(quotient_or_zero(g, y.get()), shape, mask)));
      });
}

Tensor logsumexp(const Tensor& x, const Dims& dims, KeepDim keep, Caller at) {
  const CallSite site("logsumexp", at);
  const unsigned mask = dims.mask(x.ndim());
  const Tensor top = raw::reduce(Reduction::max, x, dims, KeepDim::yes);
  // Of infinite ones nothing can be taken away.
  const Tensor shift =
      raw::where(raw::isfinite(top), top, Tensor::zeros({}, x.dtype(), x.device()));
  const Tensor total =
      raw::reduce(Reduction::sum, raw::exp(raw::binary(Binary::sub, x, shift)), dims, KeepDim::yes);
  const Tensor y = raw::add(raw::log(total), shift);
  Tensor result = keep == KeepDim::yes ? y : raw::reshape(y, dropped_shape(x.shape(), mask));
  return record("logsumexp", {x}, result,
                [x = Saved(x), y = Saved(y), mask](const Tensor& g, Gradients& out) {
                  const Tensor zero = Tensor::zeros({}, g.dtype(), g.device());
                  const Tensor level = raw::where(raw::isfinite(y.get()), y.get(), zero);
                  const Tensor share = raw::exp(raw::binary(Binary::sub, x.get(), level));
                  out.set(0, raw::mul(share, kept(g, x.get().shape(), mask)));
                });
}

namespace {
Tensor as_boolean(const Tensor& x) { return x.dtype() == boolean ? x : x != 0; }
}  // namespace
Tensor any(const Tensor& x, const Dims& dims, KeepDim keep, Caller at) {
  const CallSite site("any", at);
  return raw::reduce(Reduction::max, as_boolean(x), dims, keep);
}
Tensor all(const Tensor& x, const Dims& dims, KeepDim keep, Caller at) {
  const CallSite site("all", at);
  return raw::reduce(Reduction::min, as_boolean(x), dims, keep);
}

namespace {

void expect_elements(const char* name, const Shape& shape, unsigned mask) {
  TESSERA_EXPECT(count_of(shape, mask) > 0, name, ": ", shape,
                 " has no element along the reduced dimensions, so none can be chosen");
}

Tensor shared_extreme(const char* name, Reduction op, const Tensor& x, const Dims& dims,
                      KeepDim keep) {
  const unsigned mask = dims.mask(x.ndim());
  expect_elements(name, x.shape(), mask);
  Tensor y = raw::reduce(op, x, dims, keep);
  return record(
      name, {x}, y, [x = Saved(x), y = Saved(y), dims, mask](const Tensor& g, Gradients& out) {
        const Shape& shape = x.get().shape();
        const Tensor is_best = raw::cast(x.get() == kept(y.get(), shape, mask), g.dtype());
        const Tensor count = raw::reduce(Reduction::sum, is_best, dims, KeepDim::yes);
        const Tensor share = raw::binary(Binary::div, kept(g, shape, mask), count);
        out.set(0, raw::mul(is_best, share));
      });
}

// Of shape [], the one position along a dimension that is not there.
Tensor position(const char* name, Reduction op, const Tensor& x, const Dims& dims, KeepDim keep) {
  expect_elements(name, x.shape(), dims.mask(x.ndim()));
  return raw::reduce(op, x, dims, keep);
}

ValuesAndIndices first_extreme(const char* name, Reduction op, const Tensor& x, int dim,
                               KeepDim keep) {
  if (x.ndim() == 0) return {x * 1.0, position(name, op, x, dim, keep)};
  const int d = normalize_dim(dim, x.ndim());
  const Tensor at = position(name, op, x, d, KeepDim::yes);
  ValuesAndIndices out{gather(x, d, at), at};
  if (keep == KeepDim::no) {
    const Shape shape = x.shape().without(d);
    out = {reshape(out.values, shape), raw::reshape(at, shape)};
  }
  return out;
}

}  // namespace

Tensor amax(const Tensor& x, const Dims& dims, KeepDim keep, Caller at) {
  const CallSite site("amax", at);
  return shared_extreme("amax", Reduction::max, x, dims, keep);
}
Tensor amin(const Tensor& x, const Dims& dims, KeepDim keep, Caller at) {
  const CallSite site("amin", at);
  return shared_extreme("amin", Reduction::min, x, dims, keep);
}
Tensor max(const Tensor& x, Caller at) {
  const CallSite site("max", at);
  return amax(x);
}
Tensor min(const Tensor& x, Caller at) {
  const CallSite site("min", at);
  return amin(x);
}
ValuesAndIndices max_with_index(const Tensor& x, int dim, KeepDim keep, Caller at) {
  const CallSite site("max_with_index", at);
  return first_extreme("max", Reduction::argmax, x, dim, keep);
}
ValuesAndIndices min_with_index(const Tensor& x, int dim, KeepDim keep, Caller at) {
  const CallSite site("min_with_index", at);
  return first_extreme("min", Reduction::argmin, x, dim, keep);
}
Tensor max(const Tensor& x, int dim, KeepDim keep, Caller at) {
  const CallSite site("max", at);
  return max_with_index(x, dim, keep).values;
}
Tensor min(const Tensor& x, int dim, KeepDim keep, Caller at) {
  const CallSite site("min", at);
  return min_with_index(x, dim, keep).values;
}
Tensor argmax(const Tensor& x, int dim, KeepDim keep, Caller at) {
  const CallSite site("argmax", at);
  return position("argmax", Reduction::argmax, x, dim, keep);
}
Tensor argmin(const Tensor& x, int dim, KeepDim keep, Caller at) {
  const CallSite site("argmin", at);
  return position("argmin", Reduction::argmin, x, dim, keep);
}
Tensor argmax(const Tensor& x, Caller at) {
  const CallSite site("argmax", at);
  return position("argmax", Reduction::argmax, x, {}, KeepDim::no);
}
Tensor argmin(const Tensor& x, Caller at) {
  const CallSite site("argmin", at);
  return position("argmin", Reduction::argmin, x, {}, KeepDim::no);
}

Tensor cumsum(const Tensor& x, int dim, Caller at) {
  const CallSite site("cumsum", at);
  if (x.ndim() == 0) return as_scalar(x, [=](const Tensor& t) { return cumsum(t, dim); });
  const int d = normalize_dim(dim, x.ndim());
  return record("cumsum", {x}, raw::cumsum(x, d), [d](const Tensor& g, Gradients& out) {
    out.set(0, raw::cumsum(g, d, raw::Direction::backward));
  });
}
Tensor argsort(const Tensor& x, int dim, Order order, Caller at) {
  const CallSite site("argsort", at);
  if (x.ndim() == 0) return as_scalar(x, [=](const Tensor& t) { return argsort(t, dim, order); });
  return raw::argsort(x, dim, order);
}
ValuesAndIndices sort(const Tensor& x, int dim, Order order, Caller at) {
  const CallSite site("sort", at);
  const Tensor positions = argsort(x, dim, order);
  return {gather(x, dim, positions), positions};
}
ValuesAndIndices topk(const Tensor& x, std::int64_t k, int dim, Order order, Caller at) {
  const CallSite site("topk", at);
  if (x.ndim() == 0) {
    const auto [values, indices] = topk(reshape(x, {1}), k, dim, order);
    return {squeeze(values), squeeze(indices)};
  }
  const int d = normalize_dim(dim, x.ndim());
  TESSERA_EXPECT(k >= 0 && k <= x.shape()[d], "topk: k is ", k, ", expected 0 to ", x.shape()[d],
                 ", the elements along dimension ", d, " of ", x.shape());
  const Tensor positions = raw::contiguous(raw::slice(raw::argsort(x, d, order), d, 0, k));
  return {gather(x, d, positions), positions};
}

}  // namespace tessera
