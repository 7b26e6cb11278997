// Copies and elementwise operations: operands are walked with as few dimensions as their strides
// allow.
#include <cmath>
#include <limits>

#include "runtime/tensor/launch.hpp"
#include "runtime/tensor/rows.hpp"
#include "runtime/tensor/transfer.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::raw {
namespace {

using detail::launch;
using detail::reads;
using detail::table;
using detail::updates;
using detail::writes;
using kernels::UnaryOp;

// Merges neighbouring dimensions that every operand walks with one stride.
template <std::size_t N>
struct Walk {
  Shape shape;
  std::array<Shape, N> strides;  // of each operand; 0 repeats
};

template <std::size_t N>
Walk<N> merge_dims(const Shape& shape, const std::array<const Tensor*, N>& operands) {
  Walk<N> walk;
  const auto stride = [&](std::size_t i, int d) -> std::int64_t {
    const Tensor& t = *operands[i];
    const int own = d - (shape.ndim() - t.ndim());
    return own < 0 || t.shape()[own] == 1 ? 0 : t.strides()[own];
  };
  for (int d = 0; d < shape.ndim(); ++d) {
    if (shape[d] == 1) continue;
    const int last = walk.shape.ndim() - 1;
    bool mergeable = last >= 0;
    for (std::size_t i = 0; i < N && mergeable; ++i)
      mergeable = walk.strides[i][last] == stride(i, d) * shape[d];
    if (mergeable) {
      walk.shape[last] *= shape[d];
      for (std::size_t i = 0; i < N; ++i) walk.strides[i][last] = stride(i, d);
    } else {
      walk.shape.push_back(shape[d]);
      for (std::size_t i = 0; i < N; ++i) walk.strides[i].push_back(stride(i, d));
    }
  }
  return walk;
}

// Whether one dimension of stride 1 (or none) walks all operands: the contiguous fast path.
template <std::size_t N>
bool is_flat(const Walk<N>& walk) {
  if (walk.shape.ndim() == 0) return true;
  if (walk.shape.ndim() > 1) return false;
  for (const Shape& s : walk.strides)
    if (s[0] != 1) return false;
  return true;
}

template <std::size_t N>
void narrow(const Shape& from, std::int32_t (&to)[N]) {
  for (int d = 0; d < from.ndim(); ++d) {
    TESSERA_EXPECT(from[d] <= std::numeric_limits<std::int32_t>::max(), "a strided operand spans ",
                   from[d], " elements, at most 2^31 - 1 are supported; make it contiguous");
    to[d] = static_cast<std::int32_t>(from[d]);
  }
}

void launch_unary(const char* name, UnaryOp op, const Tensor& out, const Tensor& x) {
  if (out.numel() == 0 || out.device().is_meta()) return;
  const auto walk = merge_dims<2>(out.shape(), {&out, &x});
  kernels::UnaryArgs args{};
  args.out = out.data();
  args.in = x.data();
  args.count = out.numel();
  args.op = op;
  args.out_dtype = out.dtype();
  args.in_dtype = x.dtype();
  if (!is_flat(walk)) {
    args.ndim = static_cast<std::uint8_t>(walk.shape.ndim());
    narrow(walk.shape, args.shape);
    narrow(walk.strides[0], args.out_strides);
    narrow(walk.strides[1], args.in_strides);
  }
  launch(name, out.device(), table(out.device()).unary, args, {reads(x), writes(out)});
}

bool takes_integers(UnaryOp op) {
  return op == UnaryOp::neg || op == UnaryOp::abs || op == UnaryOp::sign || op == UnaryOp::floor ||
         op == UnaryOp::round;
}

}  // namespace

Tensor unary(UnaryOp op, const Tensor& x) {
  detail::expect_computed(name(op), x.dtype());
  TESSERA_EXPECT(is_floating(x.dtype()) || op == UnaryOp::logical_not ||
                     (takes_integers(op) && x.dtype() != boolean),
                 name(op), ": the tensor is ", x.dtype(),
                 ", expected a floating dtype; cast it first");
  Tensor out = Tensor::empty(x.shape(), gives_boolean(op) ? boolean : x.dtype(), x.device());
  launch_unary(name(op), op, out, x);
  return out;
}

namespace {

// What no kernel computes would leave the result as it was allocated; see kernels::BinaryOp.
// Bytes are compared as the integers that they are.
bool compares(Binary op, DType dtype) {
  return dtype == u8 && gives_boolean(op) && op != Binary::logical_and && op != Binary::logical_or;
}

void expect_known(Binary op, DType dtype) {
  detail::expect_computed(name(op), dtype);
  const bool is_floating_only = op == Binary::pow || kernels::is_slope(op);
  const bool takes_boolean = gives_boolean(op) || op == Binary::min || op == Binary::max;
  TESSERA_EXPECT(dtype == boolean ? takes_boolean : is_floating(dtype) || !is_floating_only,
                 name(op), ": the operands are ", dtype, ", expected ",
                 is_floating_only ? "a floating dtype" : "numbers", "; cast them first");
}

// Integers wrap, and what a number beyond them becomes is nobody's intent.
void expect_holds(std::string_view op, DType dtype, double s) {
  if (is_floating(dtype)) return;
  TESSERA_EXPECT(s == std::trunc(s), op, ": the scalar ", s,
                 " is no whole number, and the tensor is ", dtype,
                 "; cast the tensor to a floating dtype first");
  const double end = dtype == u8 ? 0x1p8 : dtype == i32 ? 0x1p31 : 0x1p63;
  TESSERA_EXPECT(s >= (dtype == u8 ? 0 : -end) && s < end, op, ": the scalar ", s, " is beyond ",
                 dtype, "; cast the tensor to a wider dtype first");
}

Tensor scalar(Binary op, const Tensor& x, double s, bool left) {
  if (compares(op, x.dtype())) return scalar(op, cast(x, i32), s, left);
  expect_known(op, x.dtype());
  expect_holds(name(op), x.dtype(), s);
  Tensor out = Tensor::empty(x.shape(), gives_boolean(op) ? boolean : x.dtype(), x.device());
  if (out.numel() == 0 || x.device().is_meta()) return out;
  const auto walk = merge_dims<2>(out.shape(), {&out, &x});
  if (walk.shape.ndim() > kernels::kScalarDims) return scalar(op, contiguous(x), s, left);
  kernels::ScalarArgs args{};
  args.out = out.data();
  args.in = x.data();
  args.scalar = s;
  args.count = out.numel();
  args.op = op;
  args.dtype = x.dtype();
  args.scalar_left = left;
  if (!is_flat(walk)) {
    args.ndim = static_cast<std::uint8_t>(walk.shape.ndim());
    narrow(walk.shape, args.shape);
    narrow(walk.strides[0], args.out_strides);
    narrow(walk.strides[1], args.in_strides);
  }
  launch(name(op), x.device(), table(x.device()).scalar, args, {reads(x), writes(out)});
  return out;
}

}  // namespace

Tensor contiguous(const Tensor& x) {
  if (x.is_contiguous()) return x;
  Tensor out = Tensor::empty(x.shape(), x.dtype(), x.device());
  launch_unary("contiguous", UnaryOp::copy, out, x);
  return out;
}

Tensor cast(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  Tensor out = Tensor::empty(x.shape(), dtype, x.device());
  launch_unary("cast", UnaryOp::copy, out, x);
  return out;
}

void copy_into(const Tensor& out, const Tensor& x) {
  TESSERA_EXPECT(out.shape() == x.shape(), "copy_into: shapes ", out.shape(), " and ", x.shape(),
                 " differ");
  if (out.device() != x.device() && !out.device().is_meta() && out.device().is_beside(x.device()))
    return transfer_into(out, x);
  launch_unary("copy", UnaryOp::copy, out, x);
}

void fill(const Tensor& out, double value) {
  expect_holds("fill", out.dtype(), value);
  if (out.numel() == 0 || out.device().is_meta()) return;
  const auto walk = merge_dims<1>(out.shape(), {&out});
  kernels::FillArgs args{};
  args.out = out.data();
  args.value = value;
  args.count = out.numel();
  args.dtype = out.dtype();
  if (!is_flat(walk)) {
    args.ndim = static_cast<std::uint8_t>(walk.shape.ndim());
    narrow(walk.shape, args.shape);
    narrow(walk.strides[0], args.out_strides);
  }
  launch("fill", out.device(), table(out.device()).fill, args, {writes(out)});
}

Tensor cat(std::span<const Tensor> parts, int dim) {
  TESSERA_EXPECT(!parts.empty(), "cat: no tensors given");
  const int d = normalize_dim(dim, parts[0].ndim());
  std::int64_t total = 0;
  for (const Tensor& part : parts) {
    TESSERA_EXPECT(part.ndim() == parts[0].ndim() && part.dtype() == parts[0].dtype() &&
                       part.shape().with(d, 0) == parts[0].shape().with(d, 0),
                   "cat: ", part.shape(), " of ", part.dtype(), " does not join ", parts[0].shape(),
                   " of ", parts[0].dtype(), " along dimension ", d);
    total = checked_add(total, part.shape()[d]);
  }
  Tensor out = Tensor::empty(parts[0].shape().with(d, total), parts[0].dtype(), parts[0].device());
  std::int64_t at = 0;
  for (const Tensor& part : parts) {
    copy_into(slice(out, d, at, at + part.shape()[d]), part);
    at += part.shape()[d];
  }
  return out;
}

Tensor neg(const Tensor& x) { return unary(UnaryOp::neg, x); }
Tensor exp(const Tensor& x) { return unary(UnaryOp::exp, x); }
Tensor log(const Tensor& x) { return unary(UnaryOp::log, x); }
Tensor sqrt(const Tensor& x) { return unary(UnaryOp::sqrt, x); }
Tensor rsqrt(const Tensor& x) { return unary(UnaryOp::rsqrt, x); }
Tensor tanh(const Tensor& x) { return unary(UnaryOp::tanh, x); }
Tensor relu(const Tensor& x) { return unary(UnaryOp::relu, x); }
Tensor gelu(const Tensor& x) { return unary(UnaryOp::gelu, x); }
Tensor silu(const Tensor& x) { return unary(UnaryOp::silu, x); }
Tensor sigmoid(const Tensor& x) { return unary(UnaryOp::sigmoid, x); }
Tensor abs(const Tensor& x) { return unary(UnaryOp::abs, x); }
Tensor logical_not(const Tensor& x) { return unary(UnaryOp::logical_not, x); }
Tensor isfinite(const Tensor& x) { return unary(UnaryOp::isfinite, x); }

Tensor binary(Binary op, const Tensor& a, const Tensor& b) {
  const CallSite site(name(op));
  const Device& device = detail::common_device(name(op), a, b);
  TESSERA_EXPECT(a.dtype() == b.dtype(), name(op), ": operands are ", a.dtype(), " and ", b.dtype(),
                 "; cast one of them");
  if (compares(op, a.dtype())) return binary(op, cast(a, i32), cast(b, i32));
  expect_known(op, a.dtype());
  Tensor out = Tensor::empty(broadcast(a.shape(), b.shape()),
                             gives_boolean(op) ? boolean : a.dtype(), device);
  if (out.numel() == 0 || device.is_meta()) return out;
  const auto walk = merge_dims<3>(out.shape(), {&out, &a, &b});
  if (walk.shape.ndim() > kernels::kBinaryDims)
    return binary(op, contiguous(expand(a, out.shape())), contiguous(expand(b, out.shape())));
  kernels::BinaryArgs args{};
  args.out = out.data();
  args.a = a.data();
  args.b = b.data();
  args.count = out.numel();
  args.op = op;
  args.dtype = a.dtype();
  if (!is_flat(walk)) {
    args.ndim = static_cast<std::uint8_t>(walk.shape.ndim());
    narrow(walk.shape, args.shape);
    narrow(walk.strides[0], args.out_strides);
    narrow(walk.strides[1], args.a_strides);
    narrow(walk.strides[2], args.b_strides);
  }
  launch(name(op), device, table(device).binary, args, {reads(a), reads(b), writes(out)});
  return out;
}
Tensor binary(Binary op, const Tensor& a, double b) { return scalar(op, a, b, false); }
Tensor binary(Binary op, double a, const Tensor& b) { return scalar(op, b, a, true); }

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  const CallSite site("where");
  const Device& device = detail::common_device("where", a, b);
  TESSERA_EXPECT(condition.dtype() == boolean && a.dtype() == b.dtype(), "where: condition is ",
                 condition.dtype(), ", branches are ", a.dtype(), " and ", b.dtype(),
                 "; expected bool and two equal dtypes");
  Tensor out = Tensor::empty(broadcast(condition.shape(), broadcast(a.shape(), b.shape())),
                             a.dtype(), device);
  if (out.numel() == 0 || device.is_meta()) return out;
  const auto walk = merge_dims<4>(out.shape(), {&out, &condition, &a, &b});
  if (walk.shape.ndim() > kernels::kWhereDims)
    return where(contiguous(expand(condition, out.shape())), contiguous(expand(a, out.shape())),
                 contiguous(expand(b, out.shape())));
  kernels::WhereArgs args{};
  args.out = out.data();
  args.condition = condition.data();
  args.a = a.data();
  args.b = b.data();
  args.dtype = a.dtype();
  args.ndim = static_cast<std::uint8_t>(walk.shape.ndim());
  narrow(walk.shape, args.shape);
  narrow(walk.strides[1], args.condition_strides);
  narrow(walk.strides[2], args.a_strides);
  narrow(walk.strides[3], args.b_strides);
  if (args.ndim == 0) {
    args.ndim = 1;
    args.shape[0] = 1;
  }
  launch("where", device, table(device).where, args,
         {reads(condition), reads(a), reads(b), writes(out)});
  return out;
}

void axpby(const Tensor& y, const Tensor& x, double alpha, double beta) {
  TESSERA_EXPECT(y.shape() == x.shape(), "axpby: shapes ", y.shape(), " and ", x.shape(),
                 " differ");
  if (y.numel() == 0 || y.device().is_meta()) return;
  const auto walk = merge_dims<2>(y.shape(), {&y, &x});
  if (walk.shape.ndim() > kernels::kAxpbyDims) return axpby(y, contiguous(x), alpha, beta);
  kernels::AxpbyArgs args{};
  args.y = y.data();
  args.x = x.data();
  args.alpha = alpha;
  args.beta = beta;
  args.count = y.numel();
  args.y_dtype = y.dtype();
  args.x_dtype = x.dtype();
  if (!is_flat(walk)) {
    args.ndim = static_cast<std::uint8_t>(walk.shape.ndim());
    narrow(walk.shape, args.shape);
    narrow(walk.strides[0], args.y_strides);
    narrow(walk.strides[1], args.x_strides);
  }
  launch("axpby", y.device(), table(y.device()).axpby, args, {reads(x), updates(y, beta != 0)});
}

namespace {

using detail::rows_of;

// Where an elementwise result goes: onto the operand, if that lives for this operation alone.
Tensor over(Tensor& operand) {
  if (operand.is_exclusive() && operand.is_contiguous()) return operand;
  return Tensor::empty(operand.shape(), operand.dtype(), operand.device());
}

}  // namespace

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  detail::expect_gated(gate, up);
  Tensor out = Tensor::empty(gate.shape(), gate.dtype(), gate.device());
  if (out.numel() == 0 || gate.device().is_meta()) return out;
  const detail::RowsOf g = rows_of(gate), u = rows_of(up);
  launch("swiglu", gate.device(), table(gate.device()).swiglu,
         kernels::SwigluArgs{out.data(), g.tensor.data(), u.tensor.data(), g.rows, g.cols, g.cols,
                             g.stride, u.stride, gate.dtype()},
         {reads(g.tensor), reads(u.tensor), writes(out)});
  return out;
}

namespace {

// Writes to d_gate and d_up, whose rows are regular.
void swiglu_backward_into(const Tensor& d_gate, const Tensor& d_up, const Tensor& gate,
                          const Tensor& up, const Tensor& d_out) {
  if (d_gate.numel() == 0 || gate.device().is_meta()) return;
  const detail::RowsOf g = rows_of(gate), u = rows_of(up), d = rows_of(d_out);
  launch(
      "swiglu_backward", gate.device(), table(gate.device()).swiglu_backward,
      kernels::SwigluBackwardArgs{d_gate.data(), d_up.data(), g.tensor.data(), u.tensor.data(),
                                  d.tensor.data(), g.rows, g.cols, rows_of(d_gate).stride,
                                  rows_of(d_up).stride, g.stride, u.stride, d.stride, gate.dtype()},
      {reads(g.tensor), reads(u.tensor), reads(d.tensor), writes(d_gate), writes(d_up)});
}

}  // namespace

std::pair<Tensor, Tensor> halves(const Tensor& gate_up) {
  TESSERA_EXPECT(gate_up.ndim() >= 1 && gate_up.size(-1) % 2 == 0, "swiglu: gate_up is ",
                 gate_up.shape(), ", expected [..., 2 h]: gate and up side by side");
  const std::int64_t half = gate_up.size(-1) / 2;
  return {slice(gate_up, -1, 0, half), slice(gate_up, -1, half, 2 * half)};
}

std::pair<Tensor, Tensor> swiglu_backward(Tensor gate, Tensor up, const Tensor& d_out) {
  Tensor d_gate = over(gate), d_up = over(up);
  swiglu_backward_into(d_gate, d_up, gate, up, d_out);
  return {d_gate, d_up};
}

Tensor swiglu_backward(Tensor gate_up, const Tensor& d_out) {
  Tensor d = over(gate_up);
  const auto [gate, up] = halves(gate_up);
  const auto [d_gate, d_up] = halves(d);
  swiglu_backward_into(d_gate, d_up, gate, up, d_out);
  return d;
}

}  // namespace tessera::raw
