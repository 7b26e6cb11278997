// Derivatives of products and hooks. Those of layers are in layers.cpp, the others in the files of
// their headers.
#include "tessera/autograd/ops.hpp"

#include "runtime/autograd/kept_results.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::record;
using autograd::Saved;
using raw::sum_to;

Tensor on_gradient(const Tensor& x, std::function<Tensor(const Tensor& gradient)> f) {
  return record("on_gradient", {x}, x.detach(),
                [f = std::move(f)](const Tensor& g, Gradients& out) {
                  Tensor changed = f(g);
                  if (!changed.defined()) changed = g;
                  out.set(0, std::move(changed));
                });
}

Tensor matmul(const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("matmul", at);
  if (a.ndim() == 1) return squeeze(matmul(unsqueeze(a, 0), b), b.ndim() == 1 ? 0 : -2);
  if (b.ndim() == 1) return squeeze(matmul(a, unsqueeze(b, 1)), -1);
  Saved saved_a(a), saved_b(b);  // before the launch, as in linear.cpp
  return record(
      "matmul", {a, b},
      autograd::kept_product_or("matmul", a, b, [&] { return raw::matmul(a, b); }),
      [a = std::move(saved_a), b = std::move(saved_b)](const Tensor& g, Gradients& out) {
        using enum raw::Transpose;
        if (out.wants(0)) out.set(0, sum_to(raw::matmul(g, b.get(), no, yes), a.get().shape()));
        if (!out.wants(1)) return;
        if (b.get().ndim() == 2 && a.get().ndim() > 2) {  // one tall product sums over the stack
          const std::int64_t k = b.get().size(0), n = b.get().size(1);
          const std::int64_t rows = k > 0 ? a.get().numel() / k : 0;
          if (k == 0 || n == 0)  // no element
            out.set(1, Tensor::empty({k, n}, g.dtype(), g.device()));
          else
            out.set(1, raw::matmul(raw::reshape(a.get(), {rows, k}), raw::reshape(g, {rows, n}),
                                   yes, no));
        } else {
          out.set(1, sum_to(raw::matmul(a.get(), g, yes, no), b.get().shape()));
        }
      });
}

Tensor outer(const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("outer", at);
  TESSERA_EXPECT(a.ndim() == 1 && b.ndim() == 1, "outer: the tensors are ", a.shape(), " and ",
                 b.shape(), "; expected two vectors");
  return unsqueeze(a, 1) * b;
}

}  // namespace tessera
