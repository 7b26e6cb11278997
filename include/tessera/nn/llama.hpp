// Llama: a decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU. Parameters
// bear Hugging Face's names. Source: Touvron et al., "LLaMA: open and efficient foundation language
// models", 2023.
//
//   tokens ─ embedding ─┬─ norm ─ attention ─ + ─┬─ norm ─ mlp ─ + ─ ... ─ norm ─ head ─ logits
//                       └─────────────────────┘  └─────────────┘  n_layers times
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "tessera/nn/attention.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/nn/language_model.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/mlp.hpp"
#include "tessera/nn/module_list.hpp"
#include "tessera/nn/norm.hpp"

namespace tessera::nn {

struct LlamaConfig {
  std::int64_t dim = 256, n_layers = 6, n_heads = 8;
  std::int64_t n_kv_heads = 0;  // 0: as many as n_heads
  std::int64_t ffn_dim = 0;     // 0: default_ffn_dim(dim)
  std::int64_t vocab_size = 256, max_seq_len = 2048;
  double rope_theta = 10000, norm_eps = 1e-5;
  bool tie_embeddings = false;
  Projections projections = Projections::separate;  // q, k, v and gate, up of the blocks
  Recompute recompute = Recompute::none;

  // 8/3 of dim, rounded up to a multiple of 32.
  static constexpr std::int64_t default_ffn_dim(std::int64_t dim) {
    return round_up(ceil_div(checked_mul(8, dim), 3), 32);
  }
  // This config, with zeros replaced by their defaults. Throws: ContractError naming the field that
  // does not fit.
  LlamaConfig checked() const {
    TESSERA_EXPECT(dim > 0 && n_layers >= 0 && n_heads > 0 && vocab_size > 0 && max_seq_len > 0 &&
                       n_kv_heads >= 0 && ffn_dim >= 0,
                   "Llama: dim ", dim, ", n_layers ", n_layers, ", n_heads ", n_heads,
                   ", n_kv_heads ", n_kv_heads, ", ffn_dim ", ffn_dim, ", vocab_size ", vocab_size,
                   ", max_seq_len ", max_seq_len,
                   "; none may be negative, and only n_layers, n_kv_heads and ffn_dim may be 0");
    TESSERA_EXPECT(dim % n_heads == 0 && dim / n_heads % 2 == 0, "Llama: dim ", dim,
                   " over n_heads ", n_heads,
                   " gives heads of no even width; make dim / n_heads even");
    LlamaConfig c = *this;
    if (c.n_kv_heads == 0) c.n_kv_heads = n_heads;
    if (c.ffn_dim == 0) c.ffn_dim = default_ffn_dim(dim);
    return c;
  }
};
static_assert(LlamaConfig::default_ffn_dim(128) == 352 && LlamaConfig::default_ffn_dim(96) == 256);

// One layer; a good unit for fully_shard.
class LlamaBlock : public Module {
 public:
  LlamaBlock(const LlamaConfig& config, std::shared_ptr<Rotary> rotary,
             const Device& device = Device::meta())
      : input_layernorm(config.dim, config.norm_eps),
        self_attn({.dim = config.dim,
                   .n_heads = config.n_heads,
                   .n_kv_heads = config.n_kv_heads,
                   .projections = config.projections},
                  std::move(rotary)),
        post_attention_layernorm(config.dim, config.norm_eps),
        mlp(config.dim,
            config.ffn_dim > 0 ? config.ffn_dim : LlamaConfig::default_ffn_dim(config.dim),
            config.projections) {
    register_module("self_attn", self_attn);
    register_module("mlp", mlp);
    register_module("input_layernorm", input_layernorm);
    register_module("post_attention_layernorm", post_attention_layernorm);
    if (!device.is_meta()) materialize(device);
  }
  // x_BTC -> [B, T, C].
  Tensor operator()(const Tensor& x_BTC, Caller at = Caller::current()) {
    const CallSite site(at);
    const auto forward = [&](const Tensor& in_BTC) {
      const SharedInput shared;
      const auto [h_BTC, normed_BTC] = post_attention_layernorm.of_sum(
          in_BTC, self_attn(input_layernorm(in_BTC, self_attn.input_form())), mlp.input_form());
      return mlp.add_to(h_BTC, normed_BTC);
    };
    return call(forward, x_BTC);
  }

  RMSNorm input_layernorm;
  GroupedQueryAttention self_attn;
  RMSNorm post_attention_layernorm;
  SwigluMlp mlp;
};

class Llama : public LanguageModel {
 public:
  // Throws: ContractError naming the field that does not fit.
  explicit Llama(const LlamaConfig& config, const Device& device = Device::meta())
      : LanguageModel(config.vocab_size, config.max_seq_len, config.n_layers, config.recompute),
        config_(config.checked()),
        embedding(config.vocab_size, config.dim),
        norm(config.dim, config.norm_eps),
        head(config.tie_embeddings
                 ? Linear(embedding.weight)
                 : Linear(config.dim, config.vocab_size, {.bias = false, .is_streamed = true})) {
    const std::shared_ptr<Rotary> rotary(
        new Rotary(config_.max_seq_len, config_.dim / config_.n_heads, config_.rope_theta));
    for (std::int64_t i = 0; i < config_.n_layers; ++i) blocks.emplace_back(config_, rotary);
    model_.register_module("embed_tokens", embedding);
    model_.register_module("layers", blocks);
    model_.register_module("norm", norm);
    register_module("model", model_);
    register_module("lm_head", head);
    if (!device.is_meta()) materialize(device);
  }

  std::vector<Module*> parts() override {
    std::vector<Module*> parts;
    if (!config_.tie_embeddings) parts.push_back(&embedding);
    for (LlamaBlock& block : blocks) parts.push_back(&block);
    if (!config_.tie_embeddings) parts.push_back(&head);
    return parts;
  }
  std::string_view optional_prefix() const override { return "model."; }
  // Frequencies of rotary positions, which older versions of Hugging Face's model had as buffers.
  bool is_left_in_files(std::string_view name) const override {
    return name.ends_with(".rotary_emb.inv_freq");
  }
  const LlamaConfig& config() const noexcept { return config_; }

 protected:
  Tensor forward(const Tensor& tokens_BT) override {
    return norm(run(blocks, embedding(tokens_BT)));
  }
  Product& output() override { return head.product; }

 private:
  LlamaConfig config_;
  Module model_;  // the level "model." of the names

 public:
  Embedding embedding;            // model.embed_tokens
  ModuleList<LlamaBlock> blocks;  // model.layers
  RMSNorm norm;                   // model.norm
  Linear head;                    // lm_head; without a parameter of its own when tied
};

}  // namespace tessera::nn
