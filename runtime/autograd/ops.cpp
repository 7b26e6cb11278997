// Derivatives of the general operations. Those of layers are in layers.cpp.
#include "tessera/autograd/ops.hpp"

#include <array>

namespace tessera {

using autograd::Gradients;
using autograd::record;
using autograd::Saved;
using raw::Binary;
using raw::sum_to;

Tensor add(const Tensor& a, const Tensor& b) {
  return record("add", {a, b}, raw::add(a, b),
                [sa = a.shape(), sb = b.shape()](const Tensor& g, Gradients& out) {
                  if (out.wants(0)) out.set(0, sum_to(g, sa));
                  if (out.wants(1)) out.set(1, sum_to(g, sb));
                });
}

Tensor sub(const Tensor& a, const Tensor& b) {
  return record("sub", {a, b}, raw::binary(Binary::sub, a, b),
                [sa = a.shape(), sb = b.shape()](const Tensor& g, Gradients& out) {
                  if (out.wants(0)) out.set(0, sum_to(g, sa));
                  if (out.wants(1)) out.set(1, raw::neg(sum_to(g, sb)));
                });
}

Tensor mul(const Tensor& a, const Tensor& b) {
  return record("mul", {a, b}, raw::mul(a, b),
                [a = Saved(a), b = Saved(b)](const Tensor& g, Gradients& out) {
                  if (out.wants(0)) out.set(0, sum_to(raw::mul(g, b.get()), a.get().shape()));
                  if (out.wants(1)) out.set(1, sum_to(raw::mul(g, a.get()), b.get().shape()));
                });
}

Tensor div(const Tensor& a, const Tensor& b) {
  return record("div", {a, b}, raw::binary(Binary::div, a, b),
                [a = Saved(a), b = Saved(b)](const Tensor& g, Gradients& out) {
                  const Tensor scaled = raw::binary(Binary::div, g, b.get());
                  if (out.wants(0)) out.set(0, sum_to(scaled, a.get().shape()));
                  if (out.wants(1)) {
                    const Tensor quotient = raw::binary(Binary::div, a.get(), b.get());
                    out.set(1, raw::neg(sum_to(raw::mul(scaled, quotient), b.get().shape())));
                  }
                });
}

Tensor add(const Tensor& a, double b) {
  return record("add", {a}, raw::binary(Binary::add, a, b),
                [](const Tensor& g, Gradients& out) { out.set(0, g); });
}
Tensor mul(const Tensor& a, double b) {
  return record("mul", {a}, raw::mul(a, b),
                [b](const Tensor& g, Gradients& out) { out.set(0, raw::mul(g, b)); });
}
Tensor neg(const Tensor& x) {
  return record("neg", {x}, raw::neg(x),
                [](const Tensor& g, Gradients& out) { out.set(0, raw::neg(g)); });
}

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  return record(
      "where", {a, b}, raw::where(condition, a, b),
      [c = Saved(condition), sa = a.shape(), sb = b.shape()](const Tensor& g, Gradients& out) {
        const Tensor zero = Tensor::zeros({}, g.dtype(), g.device());
        if (out.wants(0)) out.set(0, sum_to(raw::where(c.get(), g, zero), sa));
        if (out.wants(1)) out.set(1, sum_to(raw::where(c.get(), zero, g), sb));
      });
}

Tensor exp(const Tensor& x) {
  Tensor y = raw::exp(x);
  return record("exp", {x}, y, [y = Saved(y)](const Tensor& g, Gradients& out) {
    out.set(0, raw::mul(g, y.get()));
  });
}
Tensor log(const Tensor& x) {
  return record("log", {x}, raw::log(x), [x = Saved(x)](const Tensor& g, Gradients& out) {
    out.set(0, raw::binary(Binary::div, g, x.get()));
  });
}
Tensor sqrt(const Tensor& x) {
  Tensor y = raw::sqrt(x);
  return record("sqrt", {x}, y, [y = Saved(y)](const Tensor& g, Gradients& out) {
    out.set(0, raw::mul(raw::binary(Binary::div, g, y.get()), 0.5));
  });
}
Tensor tanh(const Tensor& x) {
  Tensor y = raw::tanh(x);
  return record("tanh", {x}, y, [y = Saved(y)](const Tensor& g, Gradients& out) {
    out.set(0, raw::binary(Binary::tanh_backward, y.get(), g));
  });
}
Tensor relu(const Tensor& x) {
  return record("relu", {x}, raw::relu(x), [x = Saved(x)](const Tensor& g, Gradients& out) {
    out.set(0, raw::binary(Binary::relu_backward, x.get(), g));
  });
}
Tensor gelu(const Tensor& x) {
  return record("gelu", {x}, raw::gelu(x), [x = Saved(x)](const Tensor& g, Gradients& out) {
    out.set(0, raw::binary(Binary::gelu_backward, x.get(), g));
  });
}
Tensor silu(const Tensor& x) {
  return record("silu", {x}, raw::silu(x), [x = Saved(x)](const Tensor& g, Gradients& out) {
    out.set(0, raw::binary(Binary::silu_backward, x.get(), g));
  });
}
Tensor swiglu(const Tensor& gate, const Tensor& up) {
  return record("swiglu", {gate, up}, raw::swiglu(gate, up),
                [gate = Saved(gate), up = Saved(up)](const Tensor& g, Gradients& out) mutable {
                  const bool again = out.graph_is_retained();
                  auto [d_gate, d_up] = again
                                            ? raw::swiglu_backward(gate.get(), up.get(), g)
                                            : raw::swiglu_backward(gate.extract(), up.extract(), g);
                  out.set(0, std::move(d_gate));
                  out.set(1, std::move(d_up));
                });
}
Tensor cast(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  return record("cast", {x}, raw::cast(x, dtype),
                [from = x.dtype()](const Tensor& g, Gradients& out) {
                  if (is_floating(from)) out.set(0, raw::cast(g, from));
                });
}

Tensor on_gradient(const Tensor& x, std::function<Tensor(const Tensor& gradient)> f) {
  return record("on_gradient", {x}, x.detach(),
                [f = std::move(f)](const Tensor& g, Gradients& out) {
                  Tensor changed = f(g);
                  if (!changed.defined()) changed = g;
                  out.set(0, std::move(changed));
                });
}

Tensor sum(const Tensor& x) {
  return record(
      "sum", {x}, raw::reduce_all(raw::Reduction::sum, x),
      [shape = x.shape()](const Tensor& g, Gradients& out) { out.set(0, raw::expand(g, shape)); });
}
Tensor mean(const Tensor& x) {
  return record("mean", {x}, raw::reduce_all(raw::Reduction::mean, x),
                [shape = x.shape()](const Tensor& g, Gradients& out) {
                  out.set(
                      0, raw::expand(raw::mul(g, 1.0 / static_cast<double>(shape.numel())), shape));
                });
}
Tensor norm(const Tensor& x) {
  Tensor y = raw::sqrt(raw::reduce_all(raw::Reduction::sumsq, x));
  return record("norm", {x}, y, [x = Saved(x), y = Saved(y)](const Tensor& g, Gradients& out) {
    out.set(0, raw::mul(x.get(), raw::binary(Binary::div, g, y.get())));
  });
}

namespace {
// g, reduced over `dim`, seen with that dimension as size 1.
Tensor with_dim(const Tensor& g, const Shape& shape, int dim) {
  return raw::reshape(g, shape.with(dim, 1));
}
}  // namespace

Tensor sum(const Tensor& x, int dim, raw::KeepDim keep) {
  const int d = normalize_dim(dim, x.ndim());
  return record("sum", {x}, raw::reduce(raw::Reduction::sum, x, d, keep),
                [shape = x.shape(), d](const Tensor& g, Gradients& out) {
                  out.set(0, raw::expand(with_dim(g, shape, d), shape));
                });
}
Tensor mean(const Tensor& x, int dim, raw::KeepDim keep) {
  const int d = normalize_dim(dim, x.ndim());
  return record("mean", {x}, raw::reduce(raw::Reduction::mean, x, d, keep),
                [shape = x.shape(), d](const Tensor& g, Gradients& out) {
                  const Tensor scaled = raw::mul(g, 1.0 / static_cast<double>(shape[d]));
                  out.set(0, raw::expand(with_dim(scaled, shape, d), shape));
                });
}
Tensor max(const Tensor& x, int dim) {
  const int d = normalize_dim(dim, x.ndim());
  const Tensor index = argmax(x, d);
  return record("max", {x}, raw::reduce(raw::Reduction::max, x, d),
                [shape = x.shape(), d, index = Saved(index)](const Tensor& g, Gradients& out) {
                  Tensor dx = Tensor::zeros(shape, g.dtype(), g.device());
                  raw::scatter_add_into(dx, d, with_dim(index.get(), shape, d),
                                        with_dim(g, shape, d));
                  out.set(0, std::move(dx));
                });
}

Tensor reshape(const Tensor& x, const Shape& shape) {
  return record(
      "reshape", {x}, raw::reshape(x, shape),
      [from = x.shape()](const Tensor& g, Gradients& out) { out.set(0, raw::reshape(g, from)); });
}
Tensor transpose(const Tensor& x, int dim0, int dim1) {
  return record(
      "transpose", {x}, raw::transpose(x, dim0, dim1),
      [dim0, dim1](const Tensor& g, Gradients& out) { out.set(0, raw::transpose(g, dim0, dim1)); });
}
Tensor permute(const Tensor& x, std::initializer_list<int> order) {
  std::array<int, kMaxDims> inverse{};
  int at = 0;
  for (const int o : order) inverse[normalize_dim(o, x.ndim())] = at++;
  return record("permute", {x}, raw::permute(x, {order.begin(), order.size()}),
                [inverse, n = order.size()](const Tensor& g, Gradients& out) {
                  out.set(0, raw::permute(g, {inverse.data(), n}));
                });
}
Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end) {
  const int d = normalize_dim(dim, x.ndim());
  return record("slice", {x}, raw::slice(x, d, begin, end),
                [shape = x.shape(), d, begin, end](const Tensor& g, Gradients& out) {
                  Tensor dx = Tensor::zeros(shape, g.dtype(), g.device());
                  raw::copy_into(raw::slice(dx, d, begin, end), g);
                  out.set(0, std::move(dx));
                });
}
Tensor expand(const Tensor& x, const Shape& shape) {
  return record(
      "expand", {x}, raw::expand(x, shape),
      [from = x.shape()](const Tensor& g, Gradients& out) { out.set(0, sum_to(g, from)); });
}
Tensor cat(std::span<const Tensor> parts, int dim) {
  Tensor y = raw::cat(parts, dim);
  const int d = normalize_dim(dim, y.ndim());
  std::vector<std::int64_t> sizes;
  for (const Tensor& part : parts) sizes.push_back(part.shape()[d]);
  return record("cat", parts, y, [sizes = std::move(sizes), d](const Tensor& g, Gradients& out) {
    std::int64_t at = 0;
    for (std::size_t i = 0; i < sizes.size(); at += sizes[i++])
      if (out.wants(static_cast<int>(i)))
        out.set(static_cast<int>(i), raw::slice(g, d, at, at + sizes[i]));
  });
}
Tensor stack(std::span<const Tensor> parts, int dim) {
  TESSERA_EXPECT(!parts.empty(), "stack: no tensors given");
  const int d = normalize_dim(dim, parts[0].ndim() + 1);
  std::vector<Tensor> raised;
  for (const Tensor& part : parts) {
    Shape shape;
    for (int i = 0; i <= part.ndim(); ++i) {
      if (i == d) shape.push_back(1);
      if (i < part.ndim()) shape.push_back(part.shape()[i]);
    }
    raised.push_back(reshape(part, shape));
  }
  return cat(raised, d);
}
std::vector<Tensor> split(const Tensor& x, std::int64_t size, int dim) {
  TESSERA_EXPECT(size > 0, "split: pieces of ", size, "; expected at least 1");
  std::vector<Tensor> out;
  for (std::int64_t at = 0; at < x.size(dim); at += size)
    out.push_back(slice(x, dim, at, std::min(at + size, x.size(dim))));
  return out;
}

Tensor index_select(const Tensor& x, int dim, const Tensor& index) {
  const int d = normalize_dim(dim, x.ndim());
  return record("index_select", {x}, raw::index_select(x, d, index),
                [shape = x.shape(), d, index = Saved(index)](const Tensor& g, Gradients& out) {
                  Tensor dx = Tensor::zeros(shape, g.dtype(), g.device());
                  raw::index_add_into(dx, d, index.get(), g);
                  out.set(0, std::move(dx));
                });
}
Tensor gather(const Tensor& x, int dim, const Tensor& index) {
  const int d = normalize_dim(dim, x.ndim());
  return record("gather", {x}, raw::gather(x, d, index),
                [shape = x.shape(), d, index = Saved(index)](const Tensor& g, Gradients& out) {
                  Tensor dx = Tensor::zeros(shape, g.dtype(), g.device());
                  raw::scatter_add_into(dx, d, index.get(), g);
                  out.set(0, std::move(dx));
                });
}
Tensor scatter_add(const Tensor& x, int dim, const Tensor& index, const Tensor& source) {
  const int d = normalize_dim(dim, x.ndim());
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  raw::copy_into(y, x);
  raw::scatter_add_into(y, d, index, source);
  return record("scatter_add", {x, source}, y,
                [d, index = Saved(index)](const Tensor& g, Gradients& out) {
                  out.set(0, g);
                  if (out.wants(1)) out.set(1, raw::gather(g, d, index.get()));
                });
}

Tensor matmul(const Tensor& a, const Tensor& b, Caller at) {
  const CallSite site("matmul", at);
  return record(
      "matmul", {a, b}, raw::matmul(a, b),
      [a = Saved(a), b = Saved(b)](const Tensor& g, Gradients& out) {
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

}  // namespace tessera
