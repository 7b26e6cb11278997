// Derivatives of the layers' functions but the linear one and the norms. Weight gradients go
// straight to the parameter's gradient sink, scaled, added when something is there.
#include <cmath>

#include "runtime/autograd/gradient_sink.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/autograd/ops.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::GradientSink;
using autograd::record;
using autograd::Saved;
using autograd::statistics_dtype;
using detail::launch;
using detail::reads;
using detail::reads_some;
using detail::table;
using detail::updates_some;
using detail::writes;

Tensor embedding(const Tensor& weight, const Tensor& ids) {
  TESSERA_EXPECT(weight.ndim() == 2 && (ids.dtype() == i32 || ids.dtype() == i64),
                 "embedding: weight is ", weight.shape(), ", ids are ", ids.dtype(),
                 "; expected [V, C] and i32 or i64");
  const Device& device = detail::common_device("embedding", weight, ids);
  Shape shape = ids.shape();
  shape.push_back(weight.size(1));
  Tensor y = Tensor::empty(shape, weight.dtype(), device);
  const Tensor rows = raw::contiguous(ids), w = raw::contiguous(weight);
  if (y.numel() > 0 && !device.is_meta())
    launch("embedding", device, table(device).embedding,
           kernels::EmbeddingArgs{y.data(), w.data(), rows.data(), rows.numel(), w.size(0),
                                  w.size(1), w.dtype(), rows.dtype()},
           {reads_some(w, y), reads(rows), writes(y)});
  return record(
      "embedding", {weight}, y,
      [rows = Saved(rows), shape = weight.shape()](const Tensor& gradient, Gradients& out) {
        const Tensor g = raw::contiguous(gradient);
        const Device& on = g.device();
        auto sink = out.sink(0);
        const GradientSink own =
            sink ? *sink : GradientSink{Tensor::empty(shape, g.dtype(), on), 1, false};
        if (own.tensor.numel() > 0 && !on.is_meta())
          launch("embedding_backward", on, table(on).embedding_backward,
                 kernels::EmbeddingBackwardArgs{own.tensor.data(), g.data(), rows.get().data(),
                                                rows.get().numel(), shape[0], shape[1], own.scale,
                                                g.dtype(), own.tensor.dtype(), rows.get().dtype(),
                                                own.accumulate},
                 {reads(g), reads(rows.get()),
                  own.accumulate ? updates_some(own.tensor, g) : writes(own.tensor)});
        if (!sink) out.set(0, own.tensor);
      });
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

Tensor rotate(const Tensor& input, const RopeTables& tables, bool inverse) {
  const Tensor x = input.strides()[3] == 1 || input.size(3) <= 1 ? input : raw::contiguous(input);
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  if (y.numel() == 0 || x.device().is_meta()) return y;
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
  return y;
}

}  // namespace

Tensor rope(const Tensor& x, const RopeTables& tables) {
  TESSERA_EXPECT(
      x.ndim() == 4 && x.size(3) == 2 * tables.cos.size(1) && x.size(1) <= tables.cos.size(0),
      "rope: x is ", x.shape(), ", the tables are ", tables.cos.shape(),
      "; expected [B, T, H, D] and [at least T, D/2]");
  return record("rope", {x}, rotate(x, tables, false),
                [tables](const Tensor& g, Gradients& out) { out.set(0, rotate(g, tables, true)); });
}

namespace {

// x [B, T, H, D] whose rows lie a whole number of heads apart, as the kernel walks it; a copy where
// they do not.
Tensor in_rows(const Tensor& x) {
  const std::int64_t d = x.size(3), step = x.strides()[1];
  const bool regular = (d <= 1 || x.strides()[3] == 1) && (x.size(2) <= 1 || x.strides()[2] == d) &&
                       step % d == 0 && step / d >= x.size(2) && step / d < (1 << 16) &&
                       (x.size(0) <= 1 || x.strides()[0] == step * x.size(1));
  return regular ? x : raw::contiguous(x);
}
std::uint16_t row_heads(const Tensor& x) {
  return static_cast<std::uint16_t>(
      x.size(1) <= 1 && x.is_contiguous() ? x.size(2) : x.strides()[1] / x.size(3));
}

double attention_flops(const Tensor& q) {  // two products over the causal half
  return 2.0 * static_cast<double>(q.numel()) * static_cast<double>(q.size(1));
}

struct Heads {
  Tensor q, k, v;  // [B, T, H, D], [B, T, Hkv, D] twice
};

// The views of one fused projection [B, T, H + 2 Hkv, D].
Heads split(const Tensor& qkv, std::int64_t kv_heads) {
  const std::int64_t end = qkv.size(2), v = end - kv_heads, k = v - kv_heads;
  return {raw::slice(qkv, 2, 0, k), raw::slice(qkv, 2, k, v), raw::slice(qkv, 2, v, end)};
}

struct Attended {
  Tensor o, lse;  // [B, T, H, D], [B, H, T]
};

// What both passes are told alike.
template <class Args>
Args attention_args(const Heads& x, const Attended& y) {
  Args args{};
  args.q = x.q.data();
  args.k = x.k.data();
  args.v = x.v.data();
  args.o = y.o.data();
  args.lse = y.lse.data();
  args.scale = 1.f / std::sqrt(static_cast<float>(x.q.size(3)));
  args.batch = static_cast<std::int32_t>(x.q.size(0));
  args.length = static_cast<std::int32_t>(x.q.size(1));
  args.heads = static_cast<std::uint16_t>(x.q.size(2));
  args.kv_heads = static_cast<std::uint16_t>(x.k.size(2));
  args.head_dim = static_cast<std::uint16_t>(x.q.size(3));
  args.q_row = row_heads(x.q);
  args.k_row = row_heads(x.k);
  args.v_row = row_heads(x.v);
  args.dtype = x.q.dtype();
  args.causal = true;
  return args;
}

Attended attend(const Heads& x) {
  const Tensor& q = x.q;
  const Device& device = q.device();
  Attended y{Tensor::empty(q.shape(), q.dtype(), device),
             Tensor::empty({q.size(0), q.size(2), q.size(1)}, statistics_dtype(q.dtype()), device)};
  if (y.o.numel() > 0 && !device.is_meta())
    launch("attention", device, table(device).attention,
           attention_args<kernels::AttentionArgs>(x, y),
           {reads(q), reads(x.k), reads(x.v), writes(y.o), writes(y.lse)}, attention_flops(q));
  return y;
}

// Writes the gradients of `x` into `d`, whose rows lie as in_rows() wants them.
void attention_backward(const Tensor& gradient, const Heads& x, const Attended& y, const Heads& d) {
  const Device& device = x.q.device();
  if (x.q.numel() == 0 || device.is_meta()) return;
  const Tensor g = raw::contiguous(gradient);
  auto args = attention_args<kernels::AttentionBackwardArgs>(x, y);
  const std::int64_t bytes =
      device.kind() == DeviceKind::cuda
          ? kernels::attention_workspace_bytes(args.batch, args.length, args.heads, args.kv_heads,
                                               args.head_dim, args.dtype)
          : 0;
  const Tensor workspace = bytes > 0 ? Tensor::empty({bytes / 4}, f32, device) : Tensor();
  args.dq = d.q.data();
  args.dk = d.k.data();
  args.dv = d.v.data();
  args.d_o = g.data();
  args.workspace = bytes > 0 ? workspace.data() : nullptr;
  args.dq_row = row_heads(d.q);
  args.dk_row = row_heads(d.k);
  args.dv_row = row_heads(d.v);
  launch("attention_backward", device, table(device).attention_backward, args,
         {reads(x.q), reads(x.k), reads(x.v), reads(y.o), reads(y.lse), reads(g), writes(workspace),
          writes(d.q), writes(d.k), writes(d.v)},
         2.5 * attention_flops(x.q));
}

}  // namespace

Tensor causal_attention(const Tensor& query, const Tensor& key, const Tensor& value) {
  TESSERA_EXPECT(
      query.ndim() == 4 && key.shape() == value.shape() && key.ndim() == 4 &&
          query.size(0) == key.size(0) && query.size(1) == key.size(1) &&
          query.size(3) == key.size(3) && key.size(2) > 0 && query.size(2) % key.size(2) == 0 &&
          query.size(3) > 0 && query.size(3) <= kernels::kAttentionMaxHeadDim,
      "causal_attention: q is ", query.shape(), ", k ", key.shape(), ", v ", value.shape(),
      "; expected [B, T, H, D], [B, T, Hkv, D] twice, Hkv dividing H, D from 1 to ",
      kernels::kAttentionMaxHeadDim);
  detail::common_device("causal_attention", query, key);
  const Heads x{in_rows(query), in_rows(key), in_rows(value)};
  const Attended y = attend(x);
  return record("attention", {query, key, value}, y.o,
                [q = Saved(x.q), k = Saved(x.k), v = Saved(x.v), o = Saved(y.o),
                 lse = Saved(y.lse)](const Tensor& gradient, Gradients& out) {
                  const Heads saved{q.get(), k.get(), v.get()};
                  const auto like = [&](const Tensor& t) {
                    return Tensor::empty(t.shape(), gradient.dtype(), t.device());
                  };
                  const Heads d{like(saved.q), like(saved.k), like(saved.v)};
                  attention_backward(gradient, saved, {o.get(), lse.get()}, d);
                  out.set(0, d.q);
                  out.set(1, d.k);
                  out.set(2, d.v);
                });
}

Tensor causal_attention(const Tensor& qkv, std::int64_t kv_heads) {
  const std::int64_t heads = qkv.ndim() == 4 ? qkv.size(2) - 2 * kv_heads : 0;
  TESSERA_EXPECT(kv_heads > 0 && heads > 0 && heads % kv_heads == 0 && qkv.size(3) > 0 &&
                     qkv.size(3) <= kernels::kAttentionMaxHeadDim,
                 "causal_attention: qkv is ", qkv.shape(), " with ", kv_heads,
                 " heads of keys; expected [B, T, H + 2 Hkv, D], Hkv dividing H, D from 1 to ",
                 kernels::kAttentionMaxHeadDim);
  const Tensor x = in_rows(qkv);
  const Attended y = attend(split(x, kv_heads));
  return record("attention", {qkv}, y.o,
                [x = Saved(x), o = Saved(y.o), lse = Saved(y.lse), kv_heads](const Tensor& gradient,
                                                                             Gradients& out) {
                  const Tensor& saved = x.get();
                  Tensor d = Tensor::empty(saved.shape(), gradient.dtype(), saved.device());
                  attention_backward(gradient, split(saved, kv_heads), {o.get(), lse.get()},
                                     split(d, kv_heads));
                  out.set(0, std::move(d));
                });
}

namespace {

Tensor drop(const Tensor& input, double p, std::uint64_t key, std::int64_t offset) {
  const Tensor x = raw::contiguous(input);
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  if (y.numel() == 0 || x.device().is_meta()) return y;
  launch("dropout", x.device(), table(x.device()).dropout,
         kernels::DropoutArgs{y.data(), x.data(), nullptr, key, offset, x.numel(),
                              static_cast<float>(p), x.dtype()},
         {reads(x), writes(y)});
  return y;
}

}  // namespace

Tensor dropout(const Tensor& x, double p, std::uint64_t key, std::int64_t offset) {
  TESSERA_EXPECT(p >= 0 && p <= 1, "dropout: p is ", p, ", expected a probability");
  if (p == 0) return x;
  return record(
      "dropout", {x}, drop(x, p, key, offset),
      [p, key, offset](const Tensor& g, Gradients& out) { out.set(0, drop(g, p, key, offset)); });
}

}  // namespace tessera
