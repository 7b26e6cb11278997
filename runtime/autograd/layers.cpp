// Derivatives of the layers' functions but the linear one, the norms and attention. Weight
// gradients go straight to the parameter's gradient sink, scaled, added when something is there.
#include "runtime/autograd/gradient_sink.hpp"
#include "runtime/autograd/operands.hpp"
#include "runtime/tensor/launch.hpp"
#include "runtime/tensor/rows_by_id.hpp"
#include "tessera/autograd/ops.hpp"

namespace tessera {

using autograd::DropoutKey;
using autograd::Gradients;
using autograd::GradientSink;
using autograd::record;
using autograd::Saved;
using detail::launch;
using detail::reads;
using detail::reads_some;
using detail::table;
using detail::updates_some;
using detail::writes;

Tensor embedding(const Tensor& weight, const Tensor& ids, Caller at) {
  const CallSite site("embedding", at);
  TESSERA_EXPECT(weight.ndim() == 2 && (ids.dtype() == i32 || ids.dtype() == i64),
                 "embedding: weight is ", weight.shape(), ", ids are ", ids.dtype(),
                 "; expected [V, C] and i32 or i64");
  const Device& device = detail::common_device("embedding", weight, ids);
  Shape shape = ids.shape();
  shape.push_back(weight.size(1));
  Tensor y = Tensor::empty(shape, weight.dtype(), device);
  const Tensor rows = raw::contiguous(ids), w = raw::contiguous(weight);
  if (y.numel() > 0 && !device.is_meta())
    autograd::look_up(kernels::EmbeddingArgs{y.data(), w.data(), rows.data(), rows.numel(),
                                             w.size(0), w.size(1), w.dtype(), rows.dtype()},
                      w, {reads_some(w, y), reads(rows), writes(y)});
  return record(
      "embedding", {weight}, y,
      [rows = Saved(rows), shape = weight.shape()](const Tensor& gradient, Gradients& out) {
        const Tensor order = detail::order_by_id(rows.get(), shape[0]);
        autograd::set_table(out, 0, gradient, rows.get(), order, shape);
      });
}

// Not by launch, which takes no codes.
void autograd::look_up(const kernels::EmbeddingArgs& args, const Tensor& of,
                       std::initializer_list<detail::Use> uses) {
  detail::expect_operand("embedding", of, is_floating(of.dtype()));
  detail::launch_body("embedding", of.device(),
                      kernels::Call<kernels::EmbeddingArgs>{table(of.device()).embedding, args},
                      uses);
}

void autograd::set_table(Gradients& out, int i, const Tensor& gradient, const Tensor& ids,
                         const Tensor& order, const Shape& shape) {
  const Tensor g = raw::contiguous(gradient);
  const Device& device = g.device();
  const auto sink = out.sink(i);
  const bool is_direct = sink && sink->tensor.is_contiguous();
  const GradientSink to =
      is_direct ? *sink : GradientSink{Tensor::empty(shape, g.dtype(), device), 1, false};
  if (to.tensor.numel() > 0 && !device.is_meta()) {
    const Tensor workspace =
        detail::sums_workspace(device, 1, ids.numel(), shape[1], g.dtype(), to.tensor.dtype());
    launch("embedding_backward", device, table(device).embedding_backward,
           kernels::EmbeddingBackwardArgs{
               to.tensor.data(), g.data(), ids.data(), ids.numel(), shape[0], shape[1], to.scale,
               g.dtype(), to.tensor.dtype(), ids.dtype(), to.accumulate, detail::positions(order),
               workspace.defined() ? workspace.data() : nullptr},
           {reads(g), reads(ids), reads(order), writes(workspace),
            to.accumulate ? updates_some(to.tensor, g) : writes(to.tensor)});
  }
  if (!is_direct) write_or_set(out, i, sink, to.tensor, g.dtype());
}

RopeTables RopeTables::make(std::int64_t positions, std::int64_t head_dim, double theta,
                            const Device& device) {
  TESSERA_EXPECT(head_dim > 0 && head_dim % 2 == 0, "RopeTables: head_dim is ", head_dim,
                 ", expected an even number");
  const OwnerGuard owner(device, "tables");
  RopeTables tables{Tensor::empty({positions, head_dim / 2}, f32, device),
                    Tensor::empty({positions, head_dim / 2}, f32, device)};
  if (positions > 0 && !device.is_meta())
    launch("rope_table", device, table(device).rope_table,
           kernels::RopeTableArgs{reinterpret_cast<float*>(tables.cos.data()),
                                  reinterpret_cast<float*>(tables.sin.data()), positions, head_dim,
                                  theta},
           {writes(tables.cos), writes(tables.sin)});
  return tables;
}

namespace {

// y may be x.
void rotate_into(const Tensor& y, const Tensor& x, const RopeTables& tables, bool inverse) {
  if (y.numel() == 0 || x.device().is_meta()) return;
  kernels::RopeArgs args{};
  args.y = y.data();
  args.x = x.data();
  args.cos = reinterpret_cast<const float*>(tables.cos.data());
  args.sin = reinterpret_cast<const float*>(tables.sin.data());
  for (int d = 0; d < 3; ++d) {
    args.x_strides[d] = x.strides()[d];
    args.y_strides[d] = y.strides()[d];
  }
  args.batch = static_cast<std::int32_t>(x.size(0));
  args.length = static_cast<std::int32_t>(x.size(1));
  args.heads = static_cast<std::uint16_t>(x.size(2));
  args.head_dim = static_cast<std::uint16_t>(x.size(3));
  args.dtype = x.dtype();
  args.inverse = inverse;
  launch("rope", x.device(), table(x.device()).rope, args,
         {reads(x), reads(tables.cos), reads(tables.sin), writes(y)});
}

Tensor rotate(const Tensor& input, const RopeTables& tables, bool inverse) {
  const Tensor x = input.strides()[3] == 1 || input.size(3) <= 1 ? input : raw::contiguous(input);
  const Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  rotate_into(y, x, tables, inverse);
  return y;
}

// The first heads alone, where they lie if nobody else sees x.
Tensor rotate_first(const Tensor& x, const RopeTables& tables, std::int64_t heads, bool inverse) {
  Tensor y;
  if (x.is_exclusive() && x.is_contiguous()) {
    y = x.detach();
  } else {
    y = Tensor::empty(x.shape(), x.dtype(), x.device());
    raw::copy_into(y, x);
  }
  const Tensor first = raw::slice(y, 2, 0, heads);
  rotate_into(first, first, tables, inverse);
  return y;
}

void check_rope(const Tensor& x, const RopeTables& tables) {
  autograd::expect_floating(x);
  TESSERA_EXPECT(
      x.ndim() == 4 && x.size(3) == 2 * tables.cos.size(1) && x.size(1) <= tables.cos.size(0),
      "rope: x is ", x.shape(), ", the tables are ", tables.cos.shape(),
      "; expected [B, T, H, D] and [at least T, D/2]");
}

}  // namespace

Tensor rope(const Tensor& x, const RopeTables& tables, Caller at) {
  const CallSite site("rope", at);
  check_rope(x, tables);
  return record("rope", {x}, rotate(x, tables, false),
                [tables](const Tensor& g, Gradients& out) { out.set(0, rotate(g, tables, true)); });
}

Tensor rope(Tensor x, const RopeTables& tables, std::int64_t heads, Caller at) {
  const CallSite site("rope", at);
  check_rope(x, tables);
  TESSERA_EXPECT(heads >= 0 && heads <= x.size(2), "rope: ", heads, " heads are to be turned, ",
                 x.shape(), " has ", x.size(2), "; expected 0 to ", x.size(2));
  const Tensor y = rotate_first(x, tables, heads, false);
  return record("rope", {std::move(x)}, y, [tables, heads](const Tensor& g, Gradients& out) {
    out.set(0, rotate_first(g, tables, heads, true));
  });
}

namespace {

Tensor drop(const Tensor& input, double p, DropoutKey key, std::int64_t offset) {
  const Tensor x = raw::contiguous(input);
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  if (y.numel() == 0 || x.device().is_meta()) return y;
  TESSERA_EXPECT(key.on_device || !x.device().context().is_capturing(),
                 "captured step: dropout with a key of its own would have one mask in all replays; "
                 "take autograd::next_dropout_key");
  launch("dropout", x.device(), table(x.device()).dropout,
         kernels::DropoutArgs{y.data(), x.data(), key.on_device, key.number, offset, x.numel(),
                              static_cast<float>(p), x.dtype()},
         {reads(x), writes(y)});
  return y;
}

}  // namespace

Tensor dropout(const Tensor& x, double p, autograd::DropoutKey key, std::int64_t offset,
               Caller at) {
  const CallSite site("dropout", at);
  autograd::expect_floating(x);
  TESSERA_EXPECT(p >= 0 && p <= 1, "dropout: p is ", p, ", expected a probability");
  if (p == 0) return x;
  return record(
      "dropout", {x}, drop(x, p, key, offset),
      [p, key, offset](const Tensor& g, Gradients& out) { out.set(0, drop(g, p, key, offset)); });
}

}  // namespace tessera
