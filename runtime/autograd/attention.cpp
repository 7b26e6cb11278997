// Attention: the fused kernel where it fits, else products and a softmax over all scores.
#include "tessera/autograd/attention.hpp"

#include <cmath>
#include <limits>

#include "runtime/autograd/kept_results.hpp"
#include "runtime/autograd/operands.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/autograd/ops.hpp"

namespace tessera {

using autograd::Expensive;
using autograd::Gradients;
using autograd::record;
using autograd::Saved;
using autograd::statistics_dtype;
using autograd::widened;
using detail::launch;
using detail::reads;
using detail::table;
using detail::writes;

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

Products attention_products(const Tensor& q, Products::Kind kind) {
  const auto length = static_cast<std::int32_t>(q.size(1));
  return {.kind = kind,
          .dtype = q.dtype(),
          .batch = static_cast<std::int32_t>(q.size(0) * q.size(2)),
          .m = length,
          .n = length,
          .k = static_cast<std::int32_t>(q.size(3))};
}

// Two products over all keys, or half of them.
double attention_flops(const Tensor& q, bool causal) {
  return (causal ? 2.0 : 4.0) * static_cast<double>(q.numel()) * static_cast<double>(q.size(1));
}

float default_scale(std::int64_t head_dim) { return 1.f / std::sqrt(static_cast<float>(head_dim)); }

// What the kernels read: q [B, T, H, D], k and v [B, T, Hkv, D].
struct Heads {
  Tensor q, k, v;
  bool causal = true;
  float scale = default_scale(q.size(3));
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
  args.scale = x.scale;
  args.batch = static_cast<std::int32_t>(x.q.size(0));
  args.length = static_cast<std::int32_t>(x.q.size(1));
  args.heads = static_cast<std::uint16_t>(x.q.size(2));
  args.kv_heads = static_cast<std::uint16_t>(x.k.size(2));
  args.head_dim = static_cast<std::uint16_t>(x.q.size(3));
  args.q_row = row_heads(x.q);
  args.k_row = row_heads(x.k);
  args.v_row = row_heads(x.v);
  args.dtype = x.q.dtype();
  args.causal = x.causal;
  return args;
}

Attended attend(const Heads& x) {
  const Tensor& q = x.q;
  const Device& device = q.device();
  const auto [o, lse] = autograd::kept_or(Expensive::attention, "attention", {q, x.k, x.v}, [&] {
    const Attended y{
        Tensor::empty(q.shape(), q.dtype(), device),
        Tensor::empty({q.size(0), q.size(2), q.size(1)}, statistics_dtype(q.dtype()), device)};
    if (y.o.numel() > 0 && !device.is_meta())
      launch("attention", device, table(device).attention,
             attention_args<kernels::AttentionArgs>(x, y),
             {reads(q), reads(x.k), reads(x.v), writes(y.o), writes(y.lse)},
             attention_flops(q, x.causal), attention_products(q, Products::Kind::attention));
    return std::array{y.o, y.lse};
  });
  return {o, lse};
}

// Writes the gradients of `x` into `d`, whose rows lie as in_rows() wants them.
void attention_backward(const Tensor& gradient, const Heads& x, const Attended& y, const Heads& d) {
  const Device& device = x.q.device();
  if (x.q.numel() == 0)
    for (const Tensor& t : {d.k, d.v}) raw::fill(t, 0);
  if (x.q.numel() == 0 || device.is_meta()) return;
  const Tensor g = raw::contiguous(gradient);
  auto args = attention_args<kernels::AttentionBackwardArgs>(x, y);
  args.deterministic = device.context().deterministic();
  const std::int64_t bytes =
      device.kind() == DeviceKind::cuda
          ? kernels::attention_workspace_bytes(args.batch, args.length, args.heads, args.kv_heads,
                                               args.head_dim, args.dtype, args.deterministic)
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
         2.5 * attention_flops(x.q, x.causal),
         attention_products(x.q, args.deterministic ? Products::Kind::ordered_attention_backward
                                                    : Products::Kind::attention_backward));
}

// What is kept between the passes of separate q, k and v.
struct KeptHeads {
  Saved q, k, v, o, lse;
  bool causal;
  float scale;

  KeptHeads(const Heads& x, const Attended& y)
      : q(x.q), k(x.k), v(x.v), o(y.o), lse(y.lse), causal(x.causal), scale(x.scale) {}
  // The gradients of q, k and v for that of o.
  Heads backward(const Tensor& gradient) const {
    const auto like = [&](const Saved& t) {
      return Tensor::empty(t.get().shape(), gradient.dtype(), gradient.device());
    };
    const Heads d{like(q), like(k), like(v)};
    attention_backward(gradient, {q.get(), k.get(), v.get(), causal, scale}, {o.get(), lse.get()},
                       d);
    return d;
  }
};

}  // namespace

Tensor causal_attention(const Tensor& query, const Tensor& key, const Tensor& value, Caller at) {
  const CallSite site("causal_attention", at);
  autograd::expect_floating(query);
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
                [kept = KeptHeads(x, y)](const Tensor& gradient, Gradients& out) {
                  const Heads d = kept.backward(gradient);
                  out.set(0, d.q);
                  out.set(1, d.k);
                  out.set(2, d.v);
                });
}

Tensor causal_attention(const Tensor& qkv, std::int64_t kv_heads, Caller at) {
  const CallSite site("causal_attention", at);
  autograd::expect_floating(qkv);
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

// All scores. Works in f32, or f64, on q scaled already, and sees the heads that read one head of k
// and v as rows of one matrix: products over them sum their gradients.
struct Scores {
  ScaledDotProductOptions options;
  double scale;
  Shape shape;  // [B, H, L, S]

  static Tensor wide(const Tensor& x) { return raw::contiguous(widened(x)); }
  static Tensor grouped(const Tensor& x, const Tensor& k) {  // [B, H, L, N] -> [B, Hkv, H/Hkv L, N]
    const std::int64_t rows = k.size(1) > 0 ? x.size(1) / k.size(1) * x.size(2) : 0;
    return raw::reshape(x, {x.size(0), k.size(1), rows, x.size(3)});
  }
  Tensor dropped(const Tensor& x) const {
    return dropout(x, options.dropout, options.dropout_key, options.dropout_offset.value_or(0));
  }

  // Whether a key takes part, undefined where all do.
  Tensor allowed(const Device& device) const {
    if (!options.is_causal) return options.mask;
    const Tensor query = Tensor::arange(shape[2], i64, device);
    Tensor causal = raw::binary(raw::Binary::ge, raw::reshape(query, {shape[2], 1}),
                                Tensor::arange(shape[3], i64, device));
    if (!options.mask.defined()) return causal;
    return raw::binary(raw::Binary::logical_and, options.mask, causal);
  }

  // The weights of the keys [B, H, L, S] for scaled queries.
  Tensor weights(const Tensor& q, const Tensor& k) const {
    constexpr double kNone = -std::numeric_limits<double>::infinity();
    const auto constant = [&](double value) {
      return Tensor::full({}, value, q.dtype(), q.device());
    };
    Tensor scores =
        raw::reshape(raw::matmul(grouped(q, k), k, raw::Transpose::no, raw::Transpose::yes), shape);
    if (options.bias.defined()) scores = raw::add(scores, raw::cast(options.bias, q.dtype()));
    if (const Tensor takes_part = allowed(q.device()); takes_part.defined())
      scores = raw::where(takes_part, scores, constant(kNone));
    if (shape[3] == 0 || (!options.mask.defined() && !options.bias.defined()))
      return raw::softmax(scores);
    const Tensor none = raw::binary(
        raw::Binary::eq, raw::reduce(raw::Reduction::max, scores, 3, raw::KeepDim::yes), kNone);
    scores = raw::softmax(scores);
    return raw::where(none, constant(0), scores);
  }
};

void check_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                     const ScaledDotProductOptions& options) {
  constexpr const char* kName = "scaled_dot_product_attention";
  TESSERA_EXPECT(q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4 && k.size(0) == q.size(0) &&
                     v.size(0) == q.size(0) && k.size(3) == q.size(3) && q.size(3) > 0 &&
                     v.size(1) == k.size(1) && v.size(2) == k.size(2) && k.size(1) > 0 &&
                     q.size(1) % k.size(1) == 0,
                 kName, ": q is ", q.shape(), ", k ", k.shape(), ", v ", v.shape(),
                 "; expected [B, H, L, E], [B, Hkv, S, E] and [B, Hkv, S, Ev], Hkv dividing H");
  TESSERA_EXPECT(is_floating(q.dtype()) && k.dtype() == q.dtype() && v.dtype() == q.dtype(), kName,
                 ": q is ", q.dtype(), ", k ", k.dtype(), ", v ", v.dtype(),
                 "; expected one floating dtype");
  detail::common_device(kName, q, k);
  detail::common_device(kName, q, v);
  const Shape scores{q.size(0), q.size(1), q.size(2), k.size(2)};
  const auto check_scores = [&](const char* what, const Tensor& x, DType dtype) {
    TESSERA_EXPECT(!x.defined() || (x.dtype() == dtype && broadcasts_to(x.shape(), scores)), kName,
                   ": ", what, " is ", x.shape(), " of ", x.dtype(),
                   ", expected what broadcasts to ", scores, " of ", dtype);
  };
  check_scores("mask", options.mask, boolean);
  check_scores("bias", options.bias, q.dtype());
  TESSERA_EXPECT(options.dropout >= 0 && options.dropout <= 1, kName, ": dropout is ",
                 options.dropout, ", expected a probability");
}

bool suits_kernel(const Tensor& q, const Tensor& k, const Tensor& v,
                  const ScaledDotProductOptions& options) {
  return k.size(2) == q.size(2) && v.size(3) == q.size(3) &&
         q.size(3) <= kernels::kAttentionMaxHeadDim && q.size(1) < 1 << 16 &&
         !options.mask.defined() && !options.bias.defined() && options.dropout == 0;
}

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const ScaledDotProductOptions& options, Caller at) {
  const CallSite site("scaled_dot_product_attention", at);
  check_attention(q, k, v, options);
  const auto swapped = [](const Tensor& x) { return raw::transpose(x, 1, 2); };
  if (suits_kernel(q, k, v, options)) {
    const Heads x{in_rows(swapped(q)), in_rows(swapped(k)), in_rows(swapped(v)), options.is_causal,
                  options.scale ? static_cast<float>(*options.scale) : default_scale(q.size(3))};
    const Attended y = attend(x);
    return record("attention", {q, k, v}, swapped(y.o),
                  [kept = KeptHeads(x, y), swapped](const Tensor& gradient, Gradients& out) {
                    const Heads d = kept.backward(swapped(gradient));
                    out.set(0, swapped(d.q));
                    out.set(1, swapped(d.k));
                    out.set(2, swapped(d.v));
                  });
  }
  // What the tape holds of mask and bias has no history.
  Scores s{options,
           options.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))),
           {q.size(0), q.size(1), q.size(2), k.size(2)}};
  const Tensor keys = s.wide(k), values = s.wide(v);
  const Tensor queries = raw::mul(s.wide(q), s.scale);
  const Tensor weights = s.weights(queries, keys);
  if (!options.dropout_offset) s.options.dropout_offset = autograd::dropout_offset(weights);
  const auto product = [&] {
    return std::array{
        raw::cast(raw::reshape(raw::matmul(s.grouped(s.dropped(weights), keys), values),
                               {q.size(0), q.size(1), q.size(2), v.size(3)}),
                  q.dtype())};
  };
  const Tensor o =
      autograd::kept_or(Expensive::attention, "attention by scores", {q, k, v}, product)[0];
  const Shape bias_shape = options.bias.defined() ? options.bias.shape() : Shape{};
  s.options.mask = s.options.bias = {};
  return record(
      "attention", {q, k, v, options.bias}, o,
      [s, bias_shape, dtype = q.dtype(), q = Saved(queries), k = Saved(keys), v = Saved(values),
       weights = Saved(weights)](const Tensor& gradient, Gradients& out) {
        using enum raw::Transpose;
        const Tensor& w = weights.get();
        const Tensor g = s.grouped(s.wide(gradient), k.get());
        if (out.wants(2))
          out.set(2, raw::cast(raw::matmul(s.grouped(s.dropped(w), k.get()), g, yes, no), dtype));
        Tensor d = raw::reshape(raw::matmul(g, v.get(), no, yes), s.shape);
        d = s.dropped(d);
        d = raw::softmax_backward(w, d);
        if (out.wants(3)) out.set(3, raw::cast(raw::sum_to(d, bias_shape), dtype));
        d = s.grouped(d, k.get());
        if (out.wants(0))
          out.set(0, raw::cast(
                         raw::mul(raw::reshape(raw::matmul(d, k.get()), q.get().shape()), s.scale),
                         dtype));
        if (out.wants(1))
          out.set(1, raw::cast(raw::matmul(d, s.grouped(q.get(), k.get()), yes, no), dtype));
      });
}

}  // namespace tessera
