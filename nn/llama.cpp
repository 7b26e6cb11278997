#include "tessera/nn/llama.hpp"

#include "tessera/autograd/ops.hpp"

namespace tessera::nn {
namespace {

LlamaConfig checked(LlamaConfig c) {
  TESSERA_EXPECT(c.dim > 0 && c.n_layers >= 0 && c.n_heads > 0 && c.vocab_size > 0 &&
                     c.max_seq_len > 0 && c.n_kv_heads >= 0 && c.ffn_dim >= 0,
                 "Llama: dim ", c.dim, ", n_layers ", c.n_layers, ", n_heads ", c.n_heads,
                 ", n_kv_heads ", c.n_kv_heads, ", ffn_dim ", c.ffn_dim, ", vocab_size ",
                 c.vocab_size, ", max_seq_len ", c.max_seq_len, "; none may be negative or absent");
  TESSERA_EXPECT(c.dim % c.n_heads == 0 && c.dim / c.n_heads % 2 == 0, "Llama: dim ", c.dim,
                 " over n_heads ", c.n_heads, " must give an even number for each head");
  if (c.n_kv_heads == 0) c.n_kv_heads = c.n_heads;
  if (c.ffn_dim == 0) c.ffn_dim = LlamaConfig::default_ffn_dim(c.dim);
  return c;
}

}  // namespace

LlamaBlock::LlamaBlock(const LlamaConfig& config, std::shared_ptr<Rotary> rotary,
                       const Device& device)
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

Tensor LlamaBlock::operator()(const Tensor& x_BTC, Caller at) {
  const CallSite site(at);
  const auto forward = [&](const Tensor& in_BTC) {
    const SharedFp8Input shared;
    const auto [h_BTC, normed_BTC] = post_attention_layernorm.of_sum(
        in_BTC, self_attn(input_layernorm(in_BTC, self_attn.takes_rounded())), mlp.takes_rounded());
    return mlp.add_to(h_BTC, normed_BTC);
  };
  return call(forward, x_BTC);
}

Llama::Llama(const LlamaConfig& config, const Device& device)
    : LanguageModel(config.vocab_size, config.max_seq_len, config.n_layers, config.recompute),
      config_(checked(config)),
      embedding(config.vocab_size, config.dim),
      norm(config.dim, config.norm_eps),
      head(config.tie_embeddings
               ? Linear(embedding.weight)
               : Linear(config.dim, config.vocab_size, {.bias = false, .is_streamed = true})) {
  const auto rotary = std::make_shared<Rotary>(config_.max_seq_len, config_.dim / config_.n_heads,
                                               config_.rope_theta);
  for (std::int64_t i = 0; i < config_.n_layers; ++i) blocks.emplace_back(config_, rotary);
  model_.register_module("embed_tokens", embedding);
  model_.register_module("layers", blocks);
  model_.register_module("norm", norm);
  register_module("model", model_);
  register_module("lm_head", head);
  if (!device.is_meta()) materialize(device);
}

std::vector<Module*> Llama::parts() {
  std::vector<Module*> parts;
  if (!config_.tie_embeddings) parts.push_back(&embedding);
  for (LlamaBlock& block : blocks) parts.push_back(&block);
  if (!config_.tie_embeddings) parts.push_back(&head);
  return parts;
}

Tensor Llama::forward(const Tensor& tokens_BT) { return norm(run(blocks, embedding(tokens_BT))); }

}  // namespace tessera::nn
