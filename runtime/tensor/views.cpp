// Views: shape arithmetic only, no kernel.
#include <algorithm>
#include <array>

#include "tessera/tensor/ops.hpp"

namespace tessera::raw {

Tensor permute(const Tensor& x, std::span<const int> order) {
  TESSERA_EXPECT(static_cast<int>(order.size()) == x.ndim(), "permute: ", order.size(),
                 " dimensions are given for shape ", x.shape(), "; give each once");
  std::array<bool, kMaxDims> seen{};
  Shape shape, strides;
  for (const int o : order) {
    const int d = normalize_dim(o, x.ndim());
    TESSERA_EXPECT(!seen[d], "permute: dimension ", d, " is named twice");
    seen[d] = true;
    shape.push_back(x.shape()[d]);
    strides.push_back(x.strides()[d]);
  }
  return x.view(shape, strides, 0);
}

Tensor transpose(const Tensor& x, int dim0, int dim1) {
  std::array<int, kMaxDims> order{};
  for (int d = 0; d < x.ndim(); ++d) order[d] = d;
  std::swap(order[normalize_dim(dim0, x.ndim())], order[normalize_dim(dim1, x.ndim())]);
  return permute(x, {order.data(), static_cast<std::size_t>(x.ndim())});
}

Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end, std::int64_t step) {
  const int d = normalize_dim(dim, x.ndim());
  TESSERA_EXPECT(step > 0, "slice: a step of ", step, "; expected at least 1 (flip reverses)");
  TESSERA_EXPECT(0 <= begin && begin <= end && end <= x.shape()[d], "slice: [", begin, ", ", end,
                 ") is outside dimension ", d, " of ", x.shape());
  return x.view(x.shape().with(d, (end - begin + step - 1) / step),
                x.strides().with(d, step * x.strides()[d]), begin * x.strides()[d]);
}

Tensor diagonal(const Tensor& x, int offset, int dim0, int dim1) {
  const int d0 = normalize_dim(dim0, x.ndim()), d1 = normalize_dim(dim1, x.ndim());
  TESSERA_EXPECT(d0 != d1, "diagonal: dimension ", d0, " is named twice");
  const std::int64_t first0 = offset < 0 ? -offset : 0, first1 = offset > 0 ? offset : 0;
  const std::int64_t size =
      std::max<std::int64_t>(0, std::min(x.shape()[d0] - first0, x.shape()[d1] - first1));
  const unsigned both = 1u << d0 | 1u << d1;
  Shape shape = dropped_shape(x.shape(), both), strides = dropped_shape(x.strides(), both);
  shape.push_back(size);
  strides.push_back(x.strides()[d0] + x.strides()[d1]);
  return x.view(shape, strides,
                size == 0 ? 0 : first0 * x.strides()[d0] + first1 * x.strides()[d1]);
}

Tensor expand(const Tensor& x, const Shape& requested) {
  Shape shape = requested;
  for (int d = 0; d < shape.ndim(); ++d) {
    const int own = d - (shape.ndim() - x.ndim());
    if (shape[d] == -1 && own >= 0) shape[d] = x.shape()[own];
    TESSERA_EXPECT(shape[d] >= 0, "expand: -1 in ", requested, " stands for a dimension that ",
                   x.shape(), " does not have; give its size");
  }
  TESSERA_EXPECT(broadcast(x.shape(), shape) == shape, "expand: ", x.shape(),
                 " does not broadcast to ", shape);
  Shape strides = shape;
  for (int d = 0; d < shape.ndim(); ++d) {
    const int own = d - (shape.ndim() - x.ndim());
    strides[d] = own < 0 || (x.shape()[own] == 1 && shape[d] != 1) ? 0 : x.strides()[own];
  }
  return x.view(shape, strides, 0);
}

namespace {

// Strides of x seen as `shape`, if x's layout allows it without a copy.
bool view_strides(const Tensor& x, const Shape& shape, Shape& strides) {
  if (x.is_contiguous() || x.numel() == 0) {
    strides = shape.strides();
    return true;
  }
  strides = shape;
  int from = x.ndim() - 1;
  std::int64_t available = 1, step = 0;  // elements of x's current merged stretch, and its stride
  for (int d = shape.ndim() - 1; d >= 0; --d) {
    if (shape[d] == 1) {
      strides[d] = 0;
      continue;
    }
    while (available == 1 && from >= 0) {  // begin at the next dimension longer than 1
      available = x.shape()[from];
      step = x.strides()[from--];
    }
    while (shape[d] > available && from >= 0 && x.strides()[from] == step * available)
      available *= x.shape()[from--];
    if (available % shape[d] != 0) return false;
    strides[d] = step;
    step *= shape[d];
    available /= shape[d];
  }
  return available == 1;
}

}  // namespace

Tensor reshape(const Tensor& x, const Shape& requested) {
  Shape shape = requested;
  int unknown = -1;
  std::int64_t known = 1;
  for (int d = 0; d < shape.ndim(); ++d) {
    if (shape[d] == -1) {
      TESSERA_EXPECT(unknown < 0, "reshape: more than one size of ", requested,
                     " is -1; leave one open at most");
      unknown = d;
    } else {
      known = checked_mul(known, shape[d]);
    }
  }
  if (unknown >= 0) {
    TESSERA_EXPECT(known > 0 && x.numel() % known == 0, "reshape: ", x.shape(), " does not fit ",
                   requested);
    shape[unknown] = x.numel() / known;
  }
  TESSERA_EXPECT(shape.numel() == x.numel(), "reshape: ", x.shape(), " has ", x.numel(),
                 " elements, ", shape, " has ", shape.numel());
  Shape strides;
  if (view_strides(x, shape, strides)) return x.view(shape, strides, 0);
  return contiguous(x).view(shape, shape.strides(), 0);
}

}  // namespace tessera::raw

namespace tessera {

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int d = 0; d < shape.ndim(); ++d) out << (d ? ", " : "") << shape[d];
  return out << ']';
}

}  // namespace tessera
