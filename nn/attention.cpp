#include "tessera/nn/attention.hpp"

#include "tessera/autograd/ops.hpp"

namespace tessera::nn {
namespace {

AttentionOptions checked(AttentionOptions options) {
  TESSERA_EXPECT(
      options.dim > 0 && options.n_heads > 0 && options.n_kv_heads >= 0 && options.head_dim >= 0,
      "attention: dim ", options.dim, ", n_heads ", options.n_heads, ", n_kv_heads ",
      options.n_kv_heads, ", head_dim ", options.head_dim, "; expected positive sizes");
  if (options.n_kv_heads == 0) options.n_kv_heads = options.n_heads;
  TESSERA_EXPECT(options.n_heads % options.n_kv_heads == 0, "attention: n_heads ", options.n_heads,
                 " is not a multiple of n_kv_heads ", options.n_kv_heads);
  TESSERA_EXPECT(options.head_dim > 0 || options.dim % options.n_heads == 0, "attention: dim ",
                 options.dim, " is not a multiple of n_heads ", options.n_heads);
  if (options.head_dim == 0) options.head_dim = options.dim / options.n_heads;
  return options;
}

Linear heads_of(const AttentionOptions& given, std::int64_t AttentionOptions::* heads) {
  const AttentionOptions o = checked(given);
  if (o.projections == Projections::fused) return {};
  return {o.dim, o.*heads * o.head_dim, {.bias = false}};
}
Linear all_heads_of(const AttentionOptions& given) {
  const AttentionOptions o = checked(given);
  const std::int64_t q = o.n_heads * o.head_dim, kv = o.n_kv_heads * o.head_dim;
  if (o.projections == Projections::separate) return {};
  return {
      o.dim, q + 2 * kv, {.bias = false, .parts = {{"q_proj", q}, {"k_proj", kv}, {"v_proj", kv}}}};
}

void check_input(const Tensor& x) {
  TESSERA_EXPECT(x.ndim() == 3, "attention: x is ", x.shape(), ", expected [B, T, C]");
}

}  // namespace

GroupedQueryAttention::GroupedQueryAttention(const AttentionOptions& given,
                                             std::shared_ptr<Rotary> rotary, const Device& device)
    : q_proj(heads_of(given, &AttentionOptions::n_heads)),
      k_proj(heads_of(given, &AttentionOptions::n_kv_heads)),
      v_proj(heads_of(given, &AttentionOptions::n_kv_heads)),
      qkv_proj(all_heads_of(given)),
      o_proj(given.n_heads * checked(given).head_dim, given.dim, {.bias = false}),
      n_heads_(given.n_heads),
      n_kv_heads_(checked(given).n_kv_heads),
      head_dim_(checked(given).head_dim),
      rotary_(std::move(rotary)) {
  if (is_fused())
    register_module("qkv_proj", qkv_proj);
  else
    register_modules("q_proj", q_proj, "k_proj", k_proj, "v_proj", v_proj);
  register_module("o_proj", o_proj);
  if (!device.is_meta()) materialize(device);
}

Tensor GroupedQueryAttention::operator()(const Tensor& x_BTC, Caller at) {
  const CallSite site(at);
  check_input(x_BTC);
  const SharedFp8Input of_this_layer;
  const auto forward = [&](const Tensor& in_BTC) {
    const Tensor y_BTHD = is_fused() ? attend_fused(in_BTC) : attend(in_BTC);
    return o_proj(reshape(y_BTHD, {in_BTC.size(0), in_BTC.size(1), n_heads_ * head_dim_}));
  };
  return call(forward, x_BTC);
}

std::optional<Fp8Recipe> GroupedQueryAttention::takes_rounded() const {
  if (is_hooked()) return {};
  return is_fused() ? qkv_proj.takes_rounded() : all_take_rounded(q_proj, k_proj, v_proj);
}

Tensor GroupedQueryAttention::attend(const Tensor& x_BTC) {
  const std::int64_t B = x_BTC.size(0), T = x_BTC.size(1);
  Tensor q_BTHD = reshape(q_proj(x_BTC), {B, T, n_heads_, head_dim_});
  Tensor k_BTKD = reshape(k_proj(x_BTC), {B, T, n_kv_heads_, head_dim_});
  const Tensor v_BTKD = reshape(v_proj(x_BTC), {B, T, n_kv_heads_, head_dim_});
  if (rotary_) {
    q_BTHD = (*rotary_)(q_BTHD);
    k_BTKD = (*rotary_)(k_BTKD);
  }
  return causal_attention(q_BTHD, k_BTKD, v_BTKD);
}

Tensor GroupedQueryAttention::attend_fused(const Tensor& x_BTC) {
  const std::int64_t S = n_heads_ + 2 * n_kv_heads_;
  Tensor qkv_BTSD = reshape(qkv_proj(x_BTC), {x_BTC.size(0), x_BTC.size(1), S, head_dim_});
  if (rotary_) qkv_BTSD = (*rotary_)(std::move(qkv_BTSD), n_heads_ + n_kv_heads_);
  return causal_attention(qkv_BTSD, n_kv_heads_);
}

FusedAttention::FusedAttention(std::int64_t dim, std::int64_t n_heads, const Device& device)
    : c_attn(checked({.dim = dim, .n_heads = n_heads}).dim, 3 * dim),
      c_proj(dim, dim),
      n_heads_(n_heads) {
  register_module("c_attn", c_attn);
  register_module("c_proj", c_proj);
  if (!device.is_meta()) materialize(device);
}

std::optional<Fp8Recipe> FusedAttention::takes_rounded() const {
  return is_hooked() ? std::nullopt : c_attn.takes_rounded();
}

Tensor FusedAttention::operator()(const Tensor& x_BTC, Caller at) {
  const CallSite site(at);
  check_input(x_BTC);
  const SharedFp8Input of_this_layer;
  const auto attend = [&](const Tensor& in_BTC) {
    const std::int64_t B = in_BTC.size(0), T = in_BTC.size(1), C = in_BTC.size(2), H = n_heads_;
    const Tensor heads = reshape(c_attn(in_BTC), {B, T, 3 * H, C / H});
    return c_proj(reshape(causal_attention(heads, H), {B, T, C}));
  };
  return call(attend, x_BTC);
}

}  // namespace tessera::nn
