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

constexpr LinearOptions kNoBias{.bias = false};

void check_input(const Tensor& x) {
  TESSERA_EXPECT(x.ndim() == 3, "attention: x is ", x.shape(), ", expected [B, T, C]");
}

}  // namespace

GroupedQueryAttention::GroupedQueryAttention(const AttentionOptions& given,
                                             std::shared_ptr<Rotary> rotary, const Device& device)
    : q_proj(checked(given).dim, checked(given).n_heads * checked(given).head_dim, kNoBias),
      k_proj(given.dim, checked(given).n_kv_heads * checked(given).head_dim, kNoBias),
      v_proj(given.dim, checked(given).n_kv_heads * checked(given).head_dim, kNoBias),
      o_proj(given.n_heads * checked(given).head_dim, given.dim, kNoBias),
      n_heads_(given.n_heads),
      n_kv_heads_(checked(given).n_kv_heads),
      head_dim_(checked(given).head_dim),
      rotary_(std::move(rotary)) {
  register_module("q_proj", q_proj);
  register_module("k_proj", k_proj);
  register_module("v_proj", v_proj);
  register_module("o_proj", o_proj);
  if (!device.is_meta()) materialize(device);
}

Tensor GroupedQueryAttention::operator()(const Tensor& x_BTC, Caller at) {
  const CallSite site(at);
  check_input(x_BTC);
  const auto attend = [&](const Tensor& in_BTC) {
    const std::int64_t B = in_BTC.size(0), T = in_BTC.size(1);
    Tensor q_BTHD = reshape(q_proj(in_BTC), {B, T, n_heads_, head_dim_});
    Tensor k_BTKD = reshape(k_proj(in_BTC), {B, T, n_kv_heads_, head_dim_});
    const Tensor v_BTKD = reshape(v_proj(in_BTC), {B, T, n_kv_heads_, head_dim_});
    if (rotary_) {
      q_BTHD = (*rotary_)(q_BTHD);
      k_BTKD = (*rotary_)(k_BTKD);
    }
    return o_proj(reshape(causal_attention(q_BTHD, k_BTKD, v_BTKD), {B, T, n_heads_ * head_dim_}));
  };
  return call(attend, x_BTC);
}

FusedAttention::FusedAttention(std::int64_t dim, std::int64_t n_heads, const Device& device)
    : c_attn(checked({.dim = dim, .n_heads = n_heads}).dim, 3 * dim),
      c_proj(dim, dim),
      n_heads_(n_heads) {
  register_module("c_attn", c_attn);
  register_module("c_proj", c_proj);
  if (!device.is_meta()) materialize(device);
}

Tensor FusedAttention::operator()(const Tensor& x_BTC, Caller at) {
  const CallSite site(at);
  check_input(x_BTC);
  const auto attend = [&](const Tensor& in_BTC) {
    const std::int64_t B = in_BTC.size(0), T = in_BTC.size(1), C = in_BTC.size(2), H = n_heads_;
    const Tensor heads = reshape(c_attn(in_BTC), {B, T, 3 * H, C / H});
    return c_proj(reshape(causal_attention(heads, H), {B, T, C}));
  };
  return call(attend, x_BTC);
}

}  // namespace tessera::nn
