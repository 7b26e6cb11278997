// Derivatives of reading and writing at indices; lists of indices become one index of merged
// dimensions.
#include "tessera/autograd/indexing.hpp"

#include <algorithm>
#include <vector>

#include "tessera/autograd/ops.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::record;
using autograd::Saved;

namespace {

// Of a tensor of shape [], its one element along dimension 0.
Tensor along(const Tensor& x) { return x.ndim() == 0 ? reshape(x, {1}) : x; }

}  // namespace

Tensor index_select(const Tensor& x, int dim, const Tensor& index, Caller at) {
  const CallSite site("index_select", at);
  const int d = normalize_dim(dim, std::max(x.ndim(), 1));
  if (x.ndim() == 0) return reshape(index_select(along(x), d, along(index)), {});
  return record("index_select", {x}, raw::index_select(x, d, index),
                [shape = x.shape(), d, index = Saved(index)](const Tensor& g, Gradients& out) {
                  Tensor dx = Tensor::zeros(shape, g.dtype(), g.device());
                  raw::index_add_into(dx, d, index.get(), g);
                  out.set(0, std::move(dx));
                });
}

namespace {

// The part of x that an index along `dim` may be as small as.
Tensor fitted(const char* name, const Tensor& x, const Tensor& index, int dim) {
  TESSERA_EXPECT(index.ndim() == x.ndim(), name, ": index ", index.shape(), " and ", x.shape(),
                 " differ in their number of dimensions");
  Tensor y = x;
  for (int d = 0; d < x.ndim(); ++d) {
    if (d == dim || index.shape()[d] == x.shape()[d]) continue;
    TESSERA_EXPECT(index.shape()[d] < x.shape()[d], name, ": index ", index.shape(),
                   " is larger than ", x.shape(), " along dimension ", d);
    y = slice(y, d, 0, index.shape()[d]);
  }
  return y;
}

Tensor copy_of(const Tensor& x) {
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  raw::copy_into(y, x);
  return y;
}

// x with elements put at `index`, which may be smaller than x.
using PutInto = void (*)(const Tensor& out, int dim, const Tensor& index, const Tensor& source);
Tensor put(const char* name, PutInto put_into, const Tensor& x, int d, const Tensor& index,
           const Tensor& source) {
  Tensor y = copy_of(x);
  if (index.numel() == 0) return y;
  const Tensor reached = fitted(name, y, index, d);
  if (reached.shape() == y.shape()) {
    put_into(y, d, index, source);
  } else {
    const Tensor patch = copy_of(reached);
    put_into(patch, d, index, source);
    raw::copy_into(reached, patch);
  }
  return y;
}

// Of a vector along dimension d of `shape`.
Shape column_of(const Shape& shape, int d) {
  Shape column;
  for (int i = 0; i < shape.ndim(); ++i) column.push_back(i == d ? shape[i] : 1);
  return column;
}
// The part of g for sources that were put at `index`, of the result's shape: 0 where that is out of
// range, for nothing was written.
Tensor at_written(const Tensor& part, const Tensor& index, std::int64_t size) {
  const Tensor at = raw::cast(index, i64);  // i32 does not hold every size
  return where(logical_and(at >= 0, at < static_cast<double>(size)), part, 0.0);
}
// The same of sources that were set: 0, too, where another was set at this location after it.
Tensor at_set(const Tensor& part, const Shape& shape, int d, const Tensor& index) {
  const Tensor own = reshape(Tensor::arange(index.numel(), i64, index.device()) + 1, index.shape());
  const Tensor none = Tensor::zeros(shape, i64, index.device());
  const Tensor last = put("scatter", raw::scatter_into, none, d, index, own);
  return where(raw::gather(fitted("scatter", last, index, d), d, index) == own, part, 0.0);
}

// The elements of `source` that the index has a position for.
Tensor source_of(const char* name, const Tensor& source, const Tensor& index) {
  return fitted(name, source, index, -1);
}

}  // namespace

Tensor gather(const Tensor& x, int dim, const Tensor& index, Caller at) {
  const CallSite site("gather", at);
  const int d = normalize_dim(dim, std::max(x.ndim(), 1));
  if (x.ndim() == 0) return reshape(gather(along(x), d, along(index)), index.shape());
  const Tensor from = fitted("gather", x, index, d);
  return record("gather", {from}, raw::gather(from, d, index),
                [shape = from.shape(), d, index = Saved(index)](const Tensor& g, Gradients& out) {
                  Tensor dx = Tensor::zeros(shape, g.dtype(), g.device());
                  raw::scatter_add_into(dx, d, index.get(), g);
                  out.set(0, std::move(dx));
                });
}
Tensor scatter(const Tensor& x, int dim, const Tensor& index, const Tensor& source, Caller at) {
  const CallSite site("scatter", at);
  const int d = normalize_dim(dim, std::max(x.ndim(), 1));
  if (x.ndim() == 0) return reshape(scatter(along(x), d, along(index), along(source)), {});
  const Tensor values = source_of("scatter", source, index);
  return record("scatter", {x, values}, put("scatter", raw::scatter_into, x, d, index, values),
                [d, index = Saved(index)](const Tensor& g, Gradients& out) {
                  if (out.wants(0)) {
                    const Tensor zeros = Tensor::zeros(index.get().shape(), g.dtype(), g.device());
                    out.set(0, put("scatter", raw::scatter_into, g, d, index.get(), zeros));
                  }
                  if (out.wants(1)) {
                    const Tensor part =
                        raw::gather(fitted("scatter", g, index.get(), d), d, index.get());
                    out.set(1, at_set(part, g.shape(), d, index.get()));
                  }
                });
}
Tensor scatter(const Tensor& x, int dim, const Tensor& index, double value, Caller at) {
  const CallSite site("scatter", at);
  return scatter(x, dim, index, Tensor::full(index.shape(), value, x.dtype(), x.device()));
}
Tensor scatter_add(const Tensor& x, int dim, const Tensor& index, const Tensor& source, Caller at) {
  const CallSite site("scatter_add", at);
  const int d = normalize_dim(dim, std::max(x.ndim(), 1));
  if (x.ndim() == 0) return reshape(scatter_add(along(x), d, along(index), along(source)), {});
  const Tensor values = source_of("scatter_add", source, index);
  return record(
      "scatter_add", {x, values}, put("scatter_add", raw::scatter_add_into, x, d, index, values),
      [d, index = Saved(index)](const Tensor& g, Gradients& out) {
        out.set(0, g);
        if (out.wants(1)) {
          const Tensor part = raw::gather(fitted("scatter_add", g, index.get(), d), d, index.get());
          out.set(1, at_written(part, index.get(), g.size(d)));
        }
      });
}

Tensor index_add(const Tensor& x, int dim, const Tensor& index, const Tensor& source, Caller at) {
  const CallSite site("index_add", at);
  const int d = normalize_dim(dim, x.ndim());
  Tensor y = copy_of(x);
  raw::index_add_into(y, d, index, source);
  return record("index_add", {x, source}, y,
                [d, index = Saved(index)](const Tensor& g, Gradients& out) {
                  out.set(0, g);
                  if (!out.wants(1)) return;
                  const Tensor part = raw::index_select(g, d, index.get());
                  const Tensor column = reshape(index.get(), column_of(part.shape(), d));
                  out.set(1, at_written(part, column, g.size(d)));
                });
}
Tensor index_copy(const Tensor& x, int dim, const Tensor& index, const Tensor& source, Caller at) {
  const CallSite site("index_copy", at);
  const int d = normalize_dim(dim, std::max(x.ndim(), 1));
  if (x.ndim() == 0) return reshape(index_copy(along(x), d, along(index), along(source)), {});
  TESSERA_EXPECT(index.ndim() == 1 && source.shape() == x.shape().with(d, index.numel()),
                 "index_copy: index ", index.shape(), " and source ", source.shape(),
                 " do not fit ", x.shape(), " along dimension ", d);
  const Tensor positions = raw::reshape(index, column_of(source.shape(), d));
  return scatter(x, d, raw::expand(positions, source.shape()), source);
}

namespace {

void expect_positions(const char* name, const Tensor& at) {
  TESSERA_EXPECT(at.dtype() == i32 || at.dtype() == i64, name, ": an index is ", at.dtype(),
                 ", expected i32 or i64",
                 at.dtype() == boolean ? "; only the device knows how many elements a boolean "
                                         "index chooses: use where or masked_fill"
                                       : "");
}

// Indices of the dimensions `sizes`, which broadcast, as one i64 index of these dimensions merged;
// -1 where one is out of range.
Tensor merged_index(const char* name, std::span<const Tensor> at,
                    std::span<const std::int64_t> sizes) {
  using raw::Binary;
  Tensor merged, outside;
  for (std::size_t i = 0; i < at.size(); ++i) {
    expect_positions(name, at[i]);
    const Tensor given = raw::cast(at[i], i64);
    const auto n = static_cast<double>(sizes[i]);
    const Tensor position = raw::where(given < 0, raw::binary(Binary::add, given, n), given);
    const Tensor is_out = logical_or(position < 0, position >= n);
    merged = i == 0 ? position : raw::add(raw::mul(merged, n), position);
    outside = i == 0 ? is_out : logical_or(outside, is_out);
  }
  return raw::where(outside, Tensor::full({}, -1, i64, merged.device()), merged);
}

struct Placed {
  int dim;
  Tensor positions;
};

// y at tensors of positions, all broadcast to one shape.
Tensor at_positions(const Tensor& y, const std::vector<Placed>& placed) {
  bool beside = true;
  for (std::size_t i = 1; i < placed.size(); ++i)
    beside = beside && placed[i].dim == placed[i - 1].dim + 1;
  const int front = beside ? placed[0].dim : 0;
  std::vector<int> order;
  std::vector<Tensor> at;
  std::vector<std::int64_t> sizes;
  const auto others = [&](int from, int to) {
    for (int d = from; d < to; ++d)
      if (std::none_of(placed.begin(), placed.end(), [d](const Placed& p) { return p.dim == d; }))
        order.push_back(d);
  };
  others(0, front);
  for (const Placed& p : placed) {
    order.push_back(p.dim);
    at.push_back(p.positions);
    sizes.push_back(y.shape()[p.dim]);
  }
  others(front, y.ndim());
  const Tensor index = merged_index("index", at, sizes);
  const Tensor moved = permute(y, order);
  const int last = front + static_cast<int>(placed.size()) - 1;
  const Tensor rows =
      index_select(flatten(moved, front, last), front, raw::reshape(index, {index.numel()}));
  Shape shape;
  for (int d = 0; d < front; ++d) shape.push_back(moved.shape()[d]);
  for (const std::int64_t size : index.shape()) shape.push_back(size);
  for (int d = last + 1; d < moved.ndim(); ++d) shape.push_back(moved.shape()[d]);
  return reshape(rows, shape);
}

Tensor sliced(const Tensor& y, int d, const Range& range) {
  TESSERA_EXPECT(range.step > 0, "index: a step of ", range.step,
                 "; expected at least 1 (flip reverses)");
  return slice(y, d, range.begin.value_or(0), range.end.value_or(y.shape()[d]), range.step);
}

}  // namespace

Tensor index(const Tensor& x, std::span<const Index> at, Caller line) {
  const CallSite site("index", line);
  int taken = 0, ellipses = 0;
  for (const Index& i : at) {
    const bool is_ellipsis = std::holds_alternative<Ellipsis>(i.value);
    ellipses += is_ellipsis;
    taken += !is_ellipsis && !std::holds_alternative<NewAxis>(i.value);
  }
  TESSERA_EXPECT(taken <= x.ndim() && ellipses <= 1, "index: ", taken, " dimensions and ", ellipses,
                 " ellipses are given for ", x.shape(),
                 "; expected at most its dimensions and one ellipsis");
  Tensor y = x;
  int d = 0;
  for (const Index& i : at) {  // numbers take dimensions away, so that new ones have room
    if (const auto* position = std::get_if<std::int64_t>(&i.value))
      y = select(y, d, *position);
    else if (std::holds_alternative<Ellipsis>(i.value))
      d += x.ndim() - taken;
    else if (!std::holds_alternative<NewAxis>(i.value))
      ++d;
  }
  std::vector<Placed> placed;
  d = 0;
  for (const Index& i : at) {
    if (const auto* range = std::get_if<Range>(&i.value))
      y = sliced(y, d, *range), ++d;
    else if (const auto* positions = std::get_if<Tensor>(&i.value))
      placed.push_back({d++, *positions});
    else if (std::holds_alternative<NewAxis>(i.value))
      y = unsqueeze(y, d++);
    else if (std::holds_alternative<Ellipsis>(i.value))
      d += x.ndim() - taken;
  }
  return placed.empty() ? y : at_positions(y, placed);
}

Tensor index_put(const Tensor& x, std::span<const Tensor> at, const Tensor& values, Put put,
                 Caller line) {
  const CallSite site("index_put", line);
  TESSERA_EXPECT(!at.empty() && std::ssize(at) <= x.ndim(), "index_put: ", at.size(),
                 " indices are given for ", x.shape(), "; expected 1 to ", x.ndim());
  const int last = static_cast<int>(at.size()) - 1;
  const Tensor positions =
      merged_index("index_put", at, {x.shape().begin(), x.shape().begin() + at.size()});
  Shape shape = positions.shape(), rows{positions.numel()};
  for (int d = last + 1; d < x.ndim(); ++d) {
    shape.push_back(x.shape()[d]);
    rows.push_back(x.shape()[d]);
  }
  const Tensor index = raw::reshape(positions, {positions.numel()}), merged = flatten(x, 0, last),
               source = reshape(expand(values, shape), rows);
  return reshape(
      put == Put::add ? index_add(merged, 0, index, source) : index_copy(merged, 0, index, source),
      x.shape());
}

}  // namespace tessera
