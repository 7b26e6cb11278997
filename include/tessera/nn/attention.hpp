// Causal self-attention: Llama's, with grouped-query heads and rotary positions, and GPT-2's, with
// one fused projection.
//
//   B batch   T positions   C model width   H query heads   K key-value heads   D head width
//
//   x_BTC ─┬─ q_proj ─ [B, T, H, D] ─ rotate ─┐
//          ├─ k_proj ─ [B, T, K, D] ─ rotate ─┼─ softmax(q k^T / sqrt(D)) v ─ [B, T, H D]
//          └─ v_proj ─ [B, T, K, D] ──────────┘                │
//                                                            o_proj ─ y_BTC
//
// Head h of q reads head h / (H / K) of k and v. With Projections::fused one product takes the
// place of three, and one rotation the place of two:
//
//   x_BTC ── qkv_proj ─ [B, T, H + 2 K, D] ─ rotate the first H + K ─ softmax(q k^T / sqrt(D)) v ─
#pragma once

#include <memory>
#include <utility>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/key_value_cache.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/rotary.hpp"

namespace tessera::nn {

struct AttentionOptions {
  std::int64_t dim = 0;
  std::int64_t n_heads = 0;
  std::int64_t n_kv_heads = 0;  // 0: as many as n_heads
  std::int64_t head_dim = 0;    // 0: dim / n_heads
  Projections projections = Projections::separate;

  // These options, with zeros replaced by their defaults. Throws: ContractError for sizes that are
  // not positive, and for head counts that do not divide.
  AttentionOptions checked() const {
    AttentionOptions o = *this;
    TESSERA_EXPECT(dim > 0 && n_heads > 0 && n_kv_heads >= 0 && head_dim >= 0, "attention: dim ",
                   dim, ", n_heads ", n_heads, ", n_kv_heads ", n_kv_heads, ", head_dim ", head_dim,
                   "; expected positive sizes");
    if (o.n_kv_heads == 0) o.n_kv_heads = n_heads;
    TESSERA_EXPECT(n_heads % o.n_kv_heads == 0, "attention: n_heads ", n_heads,
                   " is not a multiple of n_kv_heads ", o.n_kv_heads);
    TESSERA_EXPECT(head_dim > 0 || dim % n_heads == 0, "attention: dim ", dim,
                   " is not a multiple of n_heads ", n_heads);
    if (o.head_dim == 0) o.head_dim = dim / n_heads;
    return o;
  }
};

// Its parts, without biases, are named q_proj, k_proj, v_proj and o_proj. Fused, qkv_proj stands
// for the first three, and files hold it as these. Source: Ainslie et al., "GQA", 2023.
class GroupedQueryAttention : public Module {
 public:
  // `rotary` may be shared; null: without positions. Throws: as AttentionOptions::checked.
  GroupedQueryAttention(const AttentionOptions& options, std::shared_ptr<Rotary> rotary,
                        const Device& device = Device::meta())
      : GroupedQueryAttention(Checked{options.checked()}, std::move(rotary), device) {}

  // x_BTC -> [B, T, C].
  Tensor operator()(const Tensor& x_BTC, Caller at = Caller::current()) {
    const CallSite site(at);
    TESSERA_EXPECT(x_BTC.ndim() == 3, "attention: x is ", x_BTC.shape(), ", expected [B, T, C]");
    const SharedInput of_this_layer;
    const auto forward = [&](const Tensor& in_BTC) {
      KeyValueCache* const cache = KeyValueCache::current();
      const Tensor y_BTHD = cache        ? attend_behind(in_BTC, *cache)
                            : is_fused() ? attend_fused(in_BTC)
                                         : attend(in_BTC);
      return o_proj(reshape(y_BTHD, {in_BTC.size(0), in_BTC.size(1), n_heads_ * head_dim_}));
    };
    return call(forward, x_BTC);
  }
  // As Product::input_form.
  InputForm input_form() const {
    if (is_hooked()) return {};
    return is_fused() ? qkv_proj.product.input_form()
                      : common_form(q_proj.product, k_proj.product, v_proj.product);
  }

  Linear q_proj, k_proj, v_proj;  // without parameters if fused
  Linear qkv_proj;                // without parameters if separate
  Linear o_proj;

 private:
  struct Checked {
    AttentionOptions o;

    Linear heads(std::int64_t count) const {
      if (o.projections == Projections::fused) return {};
      return {o.dim, count * o.head_dim, {.bias = false}};
    }
    Linear all_heads() const {
      const std::int64_t q = o.n_heads * o.head_dim, kv = o.n_kv_heads * o.head_dim;
      if (o.projections == Projections::separate) return {};
      return {o.dim,
              q + 2 * kv,
              {.bias = false, .parts = {{"q_proj", q}, {"k_proj", kv}, {"v_proj", kv}}}};
    }
  };
  GroupedQueryAttention(const Checked& given, std::shared_ptr<Rotary> rotary, const Device& device)
      : q_proj(given.heads(given.o.n_heads)),
        k_proj(given.heads(given.o.n_kv_heads)),
        v_proj(given.heads(given.o.n_kv_heads)),
        qkv_proj(given.all_heads()),
        o_proj(given.o.n_heads * given.o.head_dim, given.o.dim, {.bias = false}),
        n_heads_(given.o.n_heads),
        n_kv_heads_(given.o.n_kv_heads),
        head_dim_(given.o.head_dim),
        rotary_(std::move(rotary)) {
    if (is_fused())
      register_module("qkv_proj", qkv_proj);
    else
      register_modules("q_proj", q_proj, "k_proj", k_proj, "v_proj", v_proj);
    register_module("o_proj", o_proj);
    if (!device.is_meta()) materialize(device);
  }

  bool is_fused() const { return qkv_proj.weight.defined(); }
  Tensor attend(const Tensor& x_BTC) {
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
  Tensor attend_fused(const Tensor& x_BTC) {
    const std::int64_t S = n_heads_ + 2 * n_kv_heads_;
    Tensor qkv_BTSD = reshape(qkv_proj(x_BTC), {x_BTC.size(0), x_BTC.size(1), S, head_dim_});
    if (rotary_) qkv_BTSD = (*rotary_)(std::move(qkv_BTSD), n_heads_ + n_kv_heads_);
    return causal_attention(qkv_BTSD, n_kv_heads_);
  }

  // The same behind the tokens that `cache` has seen.
  Tensor attend_behind(const Tensor& x_BTC, KeyValueCache& cache) {
    const std::int64_t B = x_BTC.size(0), T = x_BTC.size(1), rotated = n_heads_ + n_kv_heads_,
                       S = rotated + n_kv_heads_;
    Tensor heads_BTSD = is_fused() ? reshape(qkv_proj(x_BTC), {B, T, S, head_dim_})
                                   : reshape(cat({q_proj(x_BTC), k_proj(x_BTC), v_proj(x_BTC)}, 2),
                                             {B, T, S, head_dim_});
    if (rotary_)
      heads_BTSD = cache.positions().defined() ? rotary_->at(heads_BTSD, cache.positions(), rotated)
                                               : (*rotary_)(std::move(heads_BTSD), rotated);
    const auto part = [&](std::int64_t begin, std::int64_t end) {
      return contiguous(slice(heads_BTSD, 2, begin, end));
    };
    return cache.attend(*this, part(0, n_heads_), part(n_heads_, rotated), part(rotated, S));
  }

  std::int64_t n_heads_, n_kv_heads_, head_dim_;
  std::shared_ptr<Rotary> rotary_;
};

// Its parts, with biases, are named c_attn (queries, keys and values side by side) and c_proj.
// Source: Radford et al., GPT-2, 2019.
class FusedAttention : public Module {
 public:
  FusedAttention(std::int64_t dim, std::int64_t n_heads, const Device& device = Device::meta())
      : c_attn(AttentionOptions{.dim = dim, .n_heads = n_heads}.checked().dim, 3 * dim),
        c_proj(dim, dim),
        n_heads_(n_heads) {
    register_module("c_attn", c_attn);
    register_module("c_proj", c_proj);
    if (!device.is_meta()) materialize(device);
  }
  // x_BTC -> [B, T, C].
  Tensor operator()(const Tensor& x_BTC, Caller at = Caller::current()) {
    const CallSite site(at);
    TESSERA_EXPECT(x_BTC.ndim() == 3, "attention: x is ", x_BTC.shape(), ", expected [B, T, C]");
    const SharedInput of_this_layer;
    const auto attend = [&](const Tensor& in_BTC) {
      const std::int64_t B = in_BTC.size(0), T = in_BTC.size(1), C = in_BTC.size(2), H = n_heads_;
      const Tensor heads = reshape(c_attn(in_BTC), {B, T, 3 * H, C / H});
      const auto part = [&](std::int64_t i) {
        return contiguous(slice(heads, 2, i * H, (i + 1) * H));
      };
      KeyValueCache* const cache = KeyValueCache::current();
      const Tensor y_BTHD =
          cache ? cache->attend(*this, part(0), part(1), part(2)) : causal_attention(heads, H);
      return c_proj(reshape(y_BTHD, {B, T, C}));
    };
    return call(attend, x_BTC);
  }
  // As Product::input_form.
  InputForm input_form() const { return is_hooked() ? InputForm() : c_attn.product.input_form(); }

  Linear c_attn, c_proj;

 private:
  std::int64_t n_heads_;
};

}  // namespace tessera::nn
