// Reductions, softmax, and indexing: kernels over contiguous [outer, n, inner] views.
#include "runtime/tensor/launch.hpp"
#include "runtime/tensor/rows_by_id.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

Tensor detail::order_by_id(const Tensor& ids, std::int64_t n) {
  const Device& device = ids.device();
  const std::int64_t count = ids.numel();
  if (device.is_meta() || device.kind() != DeviceKind::cuda || count == 0) return {};
  Tensor order = Tensor::empty({count}, i32, device);
  const Tensor workspace = Tensor::empty({kernels::order_workspace_bytes(count) / 4}, i32, device);
  launch("order_by_id", device, table(device).order_by_id,
         kernels::OrderByIdArgs{reinterpret_cast<std::int32_t*>(order.data()), ids.data(),
                                workspace.data(), count, n, ids.dtype()},
         {reads(ids), writes(workspace), writes(order)});
  return order;
}

Tensor detail::sums_workspace(const Device& device, std::int64_t outer, std::int64_t count,
                              std::int64_t cols, DType from, DType to) {
  if (device.is_meta() || device.kind() != DeviceKind::cuda) return {};
  const std::int64_t bytes = kernels::sums_workspace_bytes(outer, count, cols, from, to);
  return bytes > 0 ? Tensor::empty({bytes / 4}, f32, device) : Tensor();
}

namespace raw {
namespace {

using detail::launch;
using detail::reads;
using detail::reads_some;
using detail::table;
using detail::updates;
using detail::updates_some;
using detail::writes;

struct Middle {
  std::int64_t outer = 1, n = 1, inner = 1;
};
Middle middle_of(const Shape& shape, int dim) {
  Middle m;
  for (int d = 0; d < dim; ++d) m.outer *= shape[d];
  m.n = shape[dim];
  for (int d = dim + 1; d < shape.ndim(); ++d) m.inner *= shape[d];
  return m;
}

DType result_dtype(Reduction op, DType dtype) {
  if (op == Reduction::argmax || op == Reduction::argmin) return i64;
  if (op == Reduction::sum && !is_floating(dtype)) return i64;
  return dtype;
}

Tensor reduce_middle(Reduction op, const Tensor& x, const Middle& m, const Shape& shape) {
  const char* name = kernels::name(op);
  detail::expect_computed(name, x.dtype());
  TESSERA_EXPECT(op == Reduction::sum || op == Reduction::max || op == Reduction::min ||
                     op == Reduction::argmax || op == Reduction::argmin || is_floating(x.dtype()),
                 name, ": the tensor is ", x.dtype(), ", expected a floating dtype");
  Tensor out = Tensor::empty(shape, result_dtype(op, x.dtype()), x.device());
  if (out.numel() == 0 || x.device().is_meta()) return out;
  const Tensor in = contiguous(x);
  launch(
      name, x.device(), table(x.device()).reduce,
      kernels::ReduceArgs{out.data(), in.data(), m.outer, m.n, m.inner, op, x.dtype(), out.dtype()},
      {reads(in), writes(out)});
  return out;
}

void check_index(const char* name, const Tensor& index) {
  TESSERA_EXPECT(index.dtype() == i32 || index.dtype() == i64, name, ": the index is ",
                 index.dtype(), ", expected i32 or i64");
}

kernels::IndexArgs index_args(const Tensor& big, const Tensor& small, const Tensor& index,
                              int dim) {
  const Middle m = middle_of(big.shape(), dim);
  return {big.data(), small.data(),       index.data(), m.outer,      m.n,
          m.inner,    small.shape()[dim], big.dtype(),  index.dtype()};
}

// Adds or sets the elements of `source` where `index` says.
void put_elements(const char* name, kernels::Kernel<kernels::IndexArgs> kernels::Kernels::* kernel,
                  const Tensor& out, int dim, const Tensor& index, const Tensor& source) {
  const int d = normalize_dim(dim, out.ndim());
  check_index(name, index);
  TESSERA_EXPECT(
      out.is_contiguous() && source.dtype() == out.dtype() && source.shape() == index.shape() &&
          index.ndim() == out.ndim() && index.shape().with(d, 0) == out.shape().with(d, 0),
      name, ": source ", source.shape(), " of ", source.dtype(), " and index ", index.shape(),
      " do not fit ", out.shape(), " of ", out.dtype(), " along dimension ", d);
  if (source.numel() == 0 || out.device().is_meta()) return;
  const Tensor in = contiguous(source), at = contiguous(index);
  launch(name, out.device(), table(out.device()).*kernel, index_args(out, in, at, d),
         {reads(in), reads(at), updates_some(out, in)});
}

}  // namespace

Tensor reduce(Reduction op, const Tensor& x, const Dims& dims, KeepDim keep) {
  const unsigned mask = dims.mask(x.ndim());
  const Shape shape =
      keep == KeepDim::yes ? kept_shape(x.shape(), mask) : dropped_shape(x.shape(), mask);
  Middle m;
  bool has_begun = false, has_ended = false, is_one_run = true;
  int order[kMaxDims], count = 0;
  for (int d = 0; d < x.ndim(); ++d) {
    const bool is_reduced = (mask >> d & 1u) != 0;
    has_ended = has_ended || (has_begun && !is_reduced);
    is_one_run = is_one_run && !(is_reduced && has_ended);
    has_begun = has_begun || is_reduced;
    (is_reduced ? m.n : has_begun ? m.inner : m.outer) *= x.shape()[d];
    if (!is_reduced) order[count++] = d;
  }
  if (is_one_run) return reduce_middle(op, x, m, shape);
  for (int d = 0; d < x.ndim(); ++d)
    if ((mask >> d & 1u) != 0) order[count++] = d;
  return reduce_middle(op, permute(x, {order, static_cast<std::size_t>(count)}),
                       {m.outer * m.inner, m.n, 1}, shape);
}

Tensor reduce_all(Reduction op, const Tensor& x) { return reduce(op, x, {}); }

Tensor sum_to(const Tensor& x, const Shape& shape) {
  if (x.shape() == shape) return x;
  Tensor out = x;
  while (out.ndim() > shape.ndim()) out = reduce(Reduction::sum, out, 0);
  for (int d = 0; d < shape.ndim(); ++d)
    if (shape[d] == 1 && out.shape()[d] != 1) out = reduce(Reduction::sum, out, d, KeepDim::yes);
  TESSERA_EXPECT(out.shape() == shape, "sum_to: ", x.shape(), " was not broadcast from ", shape);
  return out;
}

Tensor softmax(const Tensor& x) {
  TESSERA_EXPECT(x.ndim() >= 1 && is_floating(x.dtype()),
                 "softmax: needs a floating tensor with a dimension, got ", x.shape(), " of ",
                 x.dtype());
  Tensor out = Tensor::empty(x.shape(), x.dtype(), x.device());
  if (out.numel() == 0 || x.device().is_meta()) return out;
  const Tensor in = contiguous(x);
  const std::int64_t cols = x.shape().back();
  launch("softmax", x.device(), table(x.device()).softmax,
         kernels::SoftmaxArgs{out.data(), in.data(), x.numel() / cols, cols, x.dtype()},
         {reads(in), writes(out)});
  return out;
}

Tensor softmax_backward(const Tensor& y, const Tensor& dy) {
  Tensor dx = Tensor::empty(y.shape(), y.dtype(), y.device());
  if (dx.numel() == 0 || y.device().is_meta()) return dx;
  const Tensor g = contiguous(dy), in = contiguous(y);
  const std::int64_t cols = y.shape().back();
  launch("softmax_backward", y.device(), table(y.device()).softmax_backward,
         kernels::SoftmaxBackwardArgs{dx.data(), in.data(), g.data(), y.numel() / cols, cols,
                                      y.dtype()},
         {reads(in), reads(g), writes(dx)});
  return dx;
}

Tensor index_select(const Tensor& x, int dim, const Tensor& index) {
  const int d = normalize_dim(dim, x.ndim());
  check_index("index_select", index);
  TESSERA_EXPECT(index.ndim() == 1, "index_select: the index has shape ", index.shape(),
                 ", expected one dimension");
  Tensor out = Tensor::empty(x.shape().with(d, index.numel()), x.dtype(), x.device());
  if (out.numel() == 0 || x.device().is_meta()) return out;
  const Tensor in = contiguous(x), at = contiguous(index);
  launch("index_select", x.device(), table(x.device()).index_select, index_args(in, out, at, d),
         {reads_some(in, out), reads(at), writes(out)});
  return out;
}

Tensor gather(const Tensor& x, int dim, const Tensor& index) {
  const int d = normalize_dim(dim, x.ndim());
  check_index("gather", index);
  TESSERA_EXPECT(index.ndim() == x.ndim() && index.shape().with(d, 0) == x.shape().with(d, 0),
                 "gather: index ", index.shape(), " must equal ", x.shape(),
                 " except along dimension ", d);
  Tensor out = Tensor::empty(index.shape(), x.dtype(), x.device());
  if (out.numel() == 0 || x.device().is_meta()) return out;
  const Tensor in = contiguous(x), at = contiguous(index);
  launch("gather", x.device(), table(x.device()).gather, index_args(in, out, at, d),
         {reads_some(in, out), reads(at), writes(out)});
  return out;
}

void index_add_into(const Tensor& out, int dim, const Tensor& index, const Tensor& source) {
  const int d = normalize_dim(dim, out.ndim());
  detail::expect_computed("index_add", out.dtype());
  check_index("index_add", index);
  TESSERA_EXPECT(out.is_contiguous() && source.dtype() == out.dtype() && index.ndim() == 1 &&
                     source.shape() == out.shape().with(d, index.numel()),
                 "index_add: source ", source.shape(), " does not fit ", out.shape(),
                 " along dimension ", d);
  if (source.numel() == 0 || out.device().is_meta()) return;
  const Tensor in = contiguous(source), at = contiguous(index);
  kernels::IndexArgs args = index_args(out, in, at, d);
  const Tensor order = detail::order_by_id(at, args.n),
               workspace = detail::sums_workspace(out.device(), args.outer, args.count, args.inner,
                                                  args.dtype, args.dtype);
  args.order = detail::positions(order);
  args.workspace = workspace.defined() ? workspace.data() : nullptr;
  launch("index_add", out.device(), table(out.device()).index_add, args,
         {reads(in), reads(at), reads(order), writes(workspace), updates_some(out, in)});
}

void scatter_add_into(const Tensor& out, int dim, const Tensor& index, const Tensor& source) {
  detail::expect_computed("scatter_add", out.dtype());
  put_elements("scatter_add", &kernels::Kernels::scatter_add, out, dim, index, source);
}
void scatter_into(const Tensor& out, int dim, const Tensor& index, const Tensor& source) {
  put_elements("scatter", &kernels::Kernels::scatter, out, dim, index, source);
}

Tensor cumsum(const Tensor& x, int dim, Direction direction) {
  const int d = normalize_dim(dim, x.ndim());
  Tensor out = Tensor::empty(x.shape(), result_dtype(Reduction::sum, x.dtype()), x.device());
  if (out.numel() == 0 || x.device().is_meta()) return out;
  const Tensor in = contiguous(x);
  const Middle m = middle_of(x.shape(), d);
  launch("cumsum", x.device(), table(x.device()).cumsum,
         kernels::CumsumArgs{out.data(), in.data(), m.outer, m.n, m.inner, x.dtype(),
                             direction == Direction::backward},
         {reads(in), writes(out)});
  return out;
}

Tensor argsort(const Tensor& x, int dim, Order order) {
  const int d = normalize_dim(dim, x.ndim()), last = x.ndim() - 1;
  if (d != last) return transpose(argsort(transpose(x, d, last), last, order), d, last);
  Tensor out = Tensor::empty(x.shape(), i64, x.device());
  if (out.numel() == 0 || x.device().is_meta()) return out;
  const Tensor in = contiguous(x);
  const std::int64_t cols = x.shape().back();
  launch("sort", x.device(), table(x.device()).sort,
         kernels::SortArgs{reinterpret_cast<std::int64_t*>(out.data()), in.data(), x.numel() / cols,
                           cols, x.dtype(), order == Order::descending},
         {reads(in), updates(out)});
  return out;
}

void sum_rows_into(const Tensor& out, const Tensor& x, double scale, Accumulate accumulate) {
  TESSERA_EXPECT(
      x.ndim() == 2 && out.shape() == Shape{x.size(1)} && out.is_contiguous() &&
          is_floating(x.dtype()) &&
          (out.dtype() == x.dtype() || (out.dtype() == f32 && size_bytes(x.dtype()) == 2)),
      "sum_rows_into: x is ", x.shape(), " of ", x.dtype(), ", out ", out.shape(), " of ",
      out.dtype(), "; expected [N, C] and contiguous [C], of one dtype or f32");
  if (out.numel() == 0 || x.device().is_meta()) return;
  const Tensor in = contiguous(x);
  const bool adds = accumulate == Accumulate::yes;
  launch("sum", x.device(), table(x.device()).reduce,
         kernels::ReduceArgs{out.data(), in.data(), 1, x.size(0), x.size(1), Reduction::sum,
                             x.dtype(), out.dtype(), adds, scale},
         {reads(in), updates(out, adds)});
}

void sumsq_into(const Tensor& out, const Tensor& x, Accumulate accumulate) {
  TESSERA_EXPECT(x.dtype() == f32 && x.is_contiguous() && out.numel() == 1 &&
                     (out.dtype() == f32 || out.dtype() == f64),
                 "sumsq_into: needs a contiguous f32 tensor and an f32 or f64 scalar");
  if (x.device().is_meta()) return;
  launch("sumsq", x.device(), table(x.device()).sumsq_flat,
         kernels::SumsqFlatArgs{.out = out.data(),
                                .in = {reinterpret_cast<const float*>(x.data())},
                                .count = {x.numel()},
                                .arrays = 1,
                                .out_dtype = out.dtype(),
                                .accumulate = accumulate == Accumulate::yes},
         {reads(x), writes(out)});
}

}  // namespace raw
}  // namespace tessera
