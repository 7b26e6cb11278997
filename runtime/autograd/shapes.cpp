// Derivatives of views, and of copies whose elements only move: the same moves, back.
#include "tessera/autograd/shapes.hpp"

#include <algorithm>
#include <array>

#include "tessera/autograd/ops.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::record;

namespace {

// A view of some elements, `view`: their gradient is written through the same view into zeros.
template <class View>
Tensor part(const char* name, const Tensor& x, View view) {
  return record(name, {x}, view(x), [shape = x.shape(), view](const Tensor& g, Gradients& out) {
    Tensor dx = Tensor::zeros(shape, g.dtype(), g.device());
    raw::copy_into(view(dx), g);
    out.set(0, std::move(dx));
  });
}

// x along dim as [outer, n, inner].
Shape around(const Shape& shape, int dim) {
  Shape out{1, shape[dim], 1};
  for (int d = 0; d < shape.ndim(); ++d)
    if (d != dim) out[d < dim ? 0 : 2] *= shape[d];
  return out;
}

}  // namespace

Tensor reshape(const Tensor& x, const Shape& shape, Caller at) {
  const CallSite site("reshape", at);
  return record(
      "reshape", {x}, raw::reshape(x, shape),
      [from = x.shape()](const Tensor& g, Gradients& out) { out.set(0, raw::reshape(g, from)); });
}
Tensor flatten(const Tensor& x, int first, int last, Caller at) {
  const CallSite site("flatten", at);
  if (x.ndim() == 0) return reshape(x, {1});
  const int from = normalize_dim(first, x.ndim()), to = normalize_dim(last, x.ndim());
  TESSERA_EXPECT(from <= to, "flatten: dimension ", first, " lies behind ", last, " of ",
                 x.shape());
  Shape shape;
  for (int d = 0; d < x.ndim(); ++d) {
    if (d > from && d <= to)
      shape[from] *= x.shape()[d];
    else
      shape.push_back(x.shape()[d]);
  }
  return reshape(x, shape);
}
Tensor squeeze(const Tensor& x, Caller at) {
  const CallSite site("squeeze", at);
  Shape shape;
  for (const std::int64_t size : x.shape())
    if (size != 1) shape.push_back(size);
  return reshape(x, shape);
}
Tensor squeeze(const Tensor& x, int dim, Caller at) {
  const CallSite site("squeeze", at);
  const int d = normalize_dim(dim, std::max(x.ndim(), 1));
  return x.ndim() == 0 || x.shape()[d] != 1 ? x : reshape(x, x.shape().without(d));
}
Tensor unsqueeze(const Tensor& x, int dim, Caller at) {
  const CallSite site("unsqueeze", at);
  const int added = normalize_dim(dim, x.ndim() + 1);
  Shape shape;
  for (int d = 0; d <= x.ndim(); ++d) {
    if (d == added) shape.push_back(1);
    if (d < x.ndim()) shape.push_back(x.shape()[d]);
  }
  return reshape(x, shape);
}
Tensor transpose(const Tensor& x, int dim0, int dim1, Caller at) {
  const CallSite site("transpose", at);
  if (x.ndim() == 0 && normalize_dim(dim0, 1) == normalize_dim(dim1, 1)) return x;
  return record(
      "transpose", {x}, raw::transpose(x, dim0, dim1),
      [dim0, dim1](const Tensor& g, Gradients& out) { out.set(0, raw::transpose(g, dim0, dim1)); });
}
Tensor permute(const Tensor& x, std::span<const int> order, Caller at) {
  const CallSite site("permute", at);
  Tensor y = raw::permute(x, order);
  std::array<int, kMaxDims> inverse{};
  int next = 0;
  for (const int o : order) inverse[normalize_dim(o, x.ndim())] = next++;
  return record("permute", {x}, y, [inverse, n = order.size()](const Tensor& g, Gradients& out) {
    out.set(0, raw::permute(g, {inverse.data(), n}));
  });
}
Tensor expand(const Tensor& x, const Shape& shape, Caller at) {
  const CallSite site("expand", at);
  return record(
      "expand", {x}, raw::expand(x, shape),
      [from = x.shape()](const Tensor& g, Gradients& out) { out.set(0, raw::sum_to(g, from)); });
}
Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end, std::int64_t step,
             Caller at) {
  const CallSite site("slice", at);
  const int d = normalize_dim(dim, x.ndim());
  const auto position = [size = x.shape()[d]](std::int64_t i) {
    return std::clamp<std::int64_t>(i < 0 ? i + size : i, 0, size);
  };
  const std::int64_t from = position(begin), to = std::max(from, position(end));
  return part("slice", x, [=](const Tensor& t) { return raw::slice(t, d, from, to, step); });
}
Tensor select(const Tensor& x, int dim, std::int64_t i, Caller at) {
  const CallSite site("select", at);
  const int d = normalize_dim(dim, x.ndim());
  const std::int64_t size = x.shape()[d];
  TESSERA_EXPECT(i >= -size && i < size, "select: position ", i, " is outside dimension ", d,
                 " of ", x.shape());
  const std::int64_t from = i < 0 ? i + size : i;
  return part("select", x, [=](const Tensor& t) {
    const Tensor row = raw::slice(t, d, from, from + 1);
    return row.view(row.shape().without(d), row.strides().without(d), 0);
  });
}
Tensor diagonal(const Tensor& x, int offset, int dim0, int dim1, Caller at) {
  const CallSite site("diagonal", at);
  return part("diagonal", x, [=](const Tensor& t) { return raw::diagonal(t, offset, dim0, dim1); });
}
std::vector<Tensor> split(const Tensor& x, std::int64_t size, int dim, Caller at) {
  const CallSite site("split", at);
  TESSERA_EXPECT(size > 0, "split: the size of a piece is ", size, "; expected at least 1");
  const std::int64_t n = x.size(dim);
  if (n == 0) return {x};
  std::vector<Tensor> out;
  for (std::int64_t first = 0; first < n; first += size)
    out.push_back(slice(x, dim, first, std::min(first + size, n)));
  return out;
}
std::vector<Tensor> chunk(const Tensor& x, std::int64_t count, int dim, Caller at) {
  const CallSite site("chunk", at);
  TESSERA_EXPECT(count > 0, "chunk: ", count, " pieces; expected at least 1");
  const std::int64_t n = x.size(dim);
  if (n == 0) return std::vector<Tensor>(static_cast<std::size_t>(count), x);
  return split(x, (n + count - 1) / count, dim);
}

Tensor contiguous(const Tensor& x, Caller at) {
  const CallSite site("contiguous", at);
  if (x.is_contiguous()) return x;
  return record("contiguous", {x}, raw::contiguous(x),
                [](const Tensor& g, Gradients& out) { out.set(0, g); });
}
Tensor cat(std::span<const Tensor> parts, int dim, Caller at) {
  const CallSite site("cat", at);
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
Tensor stack(std::span<const Tensor> parts, int dim, Caller at) {
  const CallSite site("stack", at);
  TESSERA_EXPECT(!parts.empty(), "stack: no tensors given");
  std::vector<Tensor> raised;
  for (const Tensor& part : parts) {
    TESSERA_EXPECT(part.shape() == parts[0].shape(), "stack: shapes ", parts[0].shape(), " and ",
                   part.shape(), " differ; cat joins them along a dimension that they have");
    raised.push_back(unsqueeze(part, dim));
  }
  return cat(raised, dim);
}

Tensor repeat(const Tensor& x, const Shape& times, Caller at) {
  const CallSite site("repeat", at);
  Shape shape = x.shape();
  while (shape.ndim() < times.ndim()) {
    Shape raised{1};
    for (const std::int64_t size : shape) raised.push_back(size);
    shape = raised;
  }
  Tensor y = reshape(x, shape);
  for (int d = shape.ndim() - 1, t = times.ndim() - 1; t >= 0; --d, --t) {
    TESSERA_EXPECT(times[t] >= 0, "repeat: ", times[t], " times along dimension ", d,
                   "; expected 0 or more");
    if (times[t] == 1) continue;
    const Shape m = around(shape, d);
    const Tensor copies = expand(reshape(y, {m[0], 1, m[1] * m[2]}), {m[0], times[t], m[1] * m[2]});
    y = reshape(copies, shape = shape.with(d, shape[d] * times[t]));
  }
  return y;
}
Tensor repeat_interleave(const Tensor& x, std::int64_t times, int dim, Caller at) {
  const CallSite site("repeat_interleave", at);
  const int d = normalize_dim(dim, x.ndim());
  TESSERA_EXPECT(times >= 0, "repeat_interleave: ", times, " times");
  const Shape m = around(x.shape(), d);
  const Tensor copies = expand(reshape(x, {m[0] * m[1], 1, m[2]}), {m[0] * m[1], times, m[2]});
  return reshape(copies, x.shape().with(d, x.shape()[d] * times));
}
Tensor flip(const Tensor& x, const Dims& dims, Caller at) {
  const CallSite site("flip", at);
  const unsigned mask = dims.mask(x.ndim());
  Tensor y = x;
  for (int d = 0; d < x.ndim(); ++d) {
    if ((mask >> d & 1u) == 0) continue;
    const std::int64_t n = x.shape()[d];
    y = index_select(y, d, arange(static_cast<double>(n - 1), -1, -1, i64, x.device()));
  }
  return y;
}
Tensor roll(const Tensor& x, std::int64_t by, int dim, Caller at) {
  const CallSite site("roll", at);
  const std::int64_t n = x.size(dim);
  if (n == 0) return x;
  const std::int64_t last = (by % n + n) % n;
  return last == 0 ? x : cat({slice(x, dim, n - last, n), slice(x, dim, 0, n - last)}, dim);
}

Tensor pad(const Tensor& x, std::span<const std::int64_t> widths, double value, Caller at) {
  const CallSite site("pad", at);
  TESSERA_EXPECT(widths.size() % 2 == 0 && std::ssize(widths) <= 2 * x.ndim(),
                 "pad: ", widths.size(), " widths for ", x.shape(), "; expected two a dimension");
  Shape shape = x.shape();
  for (std::size_t i = 0; i < widths.size(); i += 2) {
    const int d = x.ndim() - 1 - static_cast<int>(i / 2);
    shape[d] += widths[i] + widths[i + 1];
    TESSERA_EXPECT(shape[d] >= 0, "pad: widths ", widths[i], " and ", widths[i + 1],
                   " cut off more than dimension ", d, " of ", x.shape(), " has; cut off less");
  }
  // What padded and unpadded have in common, seen in either: `sign` 1 for the padded one.
  const auto common = [w = std::vector<std::int64_t>(widths.begin(), widths.end())](
                          Tensor t, std::int64_t sign) {
    for (std::size_t i = 0; i < w.size(); i += 2) {
      const int d = t.ndim() - 1 - static_cast<int>(i / 2);
      const std::int64_t n = t.shape()[d], begin = std::max<std::int64_t>(sign * w[i], 0),
                         end = n - std::max<std::int64_t>(sign * w[i + 1], 0);
      t = raw::slice(t, d, std::min(begin, std::max<std::int64_t>(end, 0)),
                     std::max<std::int64_t>(end, 0));
    }
    return t;
  };
  Tensor y = Tensor::full(shape, value, x.dtype(), x.device());
  raw::copy_into(common(y, 1), common(x, -1));
  return record("pad", {x}, y, [from = x.shape(), common](const Tensor& g, Gradients& out) {
    Tensor dx = Tensor::zeros(from, g.dtype(), g.device());
    raw::copy_into(common(dx, -1), common(g, 1));
    out.set(0, std::move(dx));
  });
}

namespace {

// Whether the column of each position of the last two dimensions is at most its row plus
// `diagonal`.
Tensor is_lower(const Tensor& x, int diagonal) {
  TESSERA_EXPECT(x.ndim() >= 2, "tril and triu: ", x.shape(), " has no rows and columns");
  const std::int64_t rows = x.size(-2), cols = x.size(-1);
  const Tensor row = raw::reshape(Tensor::arange(rows, i64, x.device()), {rows, 1});
  return Tensor::arange(cols, i64, x.device()) <= raw::binary(raw::Binary::add, row, diagonal);
}

}  // namespace

Tensor tril(const Tensor& x, int diagonal, Caller at) {
  const CallSite site("tril", at);
  return where(is_lower(x, diagonal), x, 0.0);
}
Tensor triu(const Tensor& x, int diagonal, Caller at) {
  const CallSite site("triu", at);
  return where(is_lower(x, diagonal - 1), 0.0, x);
}
Tensor diag(const Tensor& x, int offset, Caller at) {
  const CallSite site("diag", at);
  if (x.ndim() == 2) return diagonal(x, offset);
  TESSERA_EXPECT(x.ndim() == 1, "diag: ", x.shape(), " is neither a vector nor a matrix");
  const std::int64_t n = x.numel() + std::abs(offset);
  Tensor y = Tensor::zeros({n, n}, x.dtype(), x.device());
  raw::copy_into(raw::diagonal(y, offset, 0, 1), x);
  return record("diag", {x}, y, [offset](const Tensor& g, Gradients& out) {
    out.set(0, raw::diagonal(g, offset, 0, 1));
  });
}

}  // namespace tessera
