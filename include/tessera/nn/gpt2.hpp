// GPT-2: a decoder with LayerNorm, learned positions and GELU, its head tied to the embedding.
// Parameters bear Hugging Face's names.  Source: Radford et al., "Language models are unsupervised
// multitask learners", 2019.
#pragma once

#include <string_view>
#include <vector>

#include "tessera/nn/attention.hpp"
#include "tessera/nn/dropout.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/nn/language_model.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/mlp.hpp"
#include "tessera/nn/module_list.hpp"
#include "tessera/nn/norm.hpp"

namespace tessera::nn {

struct Gpt2Config {
  std::int64_t dim = 256, n_layers = 6, n_heads = 8;
  std::int64_t ffn_dim = 0;  // 0: 4 dim
  std::int64_t vocab_size = 256, max_seq_len = 1024;
  double norm_eps = 1e-5;
  // The probability of dropout, on the embeddings and on what each branch adds. Attention weights
  // are not dropped.
  double dropout = 0;
  bool tie_embeddings = true;
  Recompute recompute = Recompute::none;

  // This config, with zeros replaced by their defaults. Throws: ContractError naming the field that
  // does not fit.
  Gpt2Config checked() const {
    TESSERA_EXPECT(dim > 0 && n_layers >= 0 && n_heads > 0 && vocab_size > 0 && max_seq_len > 0 &&
                       ffn_dim >= 0,
                   "Gpt2: dim ", dim, ", n_layers ", n_layers, ", n_heads ", n_heads, ", ffn_dim ",
                   ffn_dim, ", vocab_size ", vocab_size, ", max_seq_len ", max_seq_len,
                   "; none may be negative, and only n_layers and ffn_dim may be 0");
    TESSERA_EXPECT(dim % n_heads == 0, "Gpt2: dim ", dim, " is not a multiple of n_heads ",
                   n_heads);
    Gpt2Config c = *this;
    if (c.ffn_dim == 0) c.ffn_dim = checked_mul(4, dim);
    return c;
  }
};

// One layer; a good unit for fully_shard.
class Gpt2Block : public Module {
 public:
  explicit Gpt2Block(const Gpt2Config& config, const Device& device = Device::meta())
      : ln_1(config.dim, config.norm_eps),
        attn(config.dim, config.n_heads),
        ln_2(config.dim, config.norm_eps),
        mlp(config.dim, config.checked().ffn_dim),
        drop(config.dropout) {
    register_module("ln_1", ln_1);
    register_module("attn", attn);
    register_module("ln_2", ln_2);
    register_module("mlp", mlp);
    register_module("drop", drop);
    if (!device.is_meta()) materialize(device);
  }
  // x_BTC -> [B, T, C].
  Tensor operator()(const Tensor& x_BTC, Caller at = Caller::current()) {
    const CallSite site(at);
    const auto forward = [&](const Tensor& in_BTC) {
      const SharedInput shared;
      const auto [h_BTC, normed_BTC] =
          ln_2.of_sum(in_BTC, drop(attn(ln_1(in_BTC, attn.input_form()))), mlp.input_form());
      return drop.drops() ? h_BTC + drop(mlp(normed_BTC)) : mlp.add_to(h_BTC, normed_BTC);
    };
    return call(forward, x_BTC);
  }

  LayerNorm ln_1;
  FusedAttention attn;
  LayerNorm ln_2;
  GeluMlp mlp;
  Dropout drop;
};

class Gpt2 : public LanguageModel {
 public:
  // Throws: ContractError naming the field that does not fit.
  explicit Gpt2(const Gpt2Config& config, const Device& device = Device::meta())
      : LanguageModel(config.vocab_size, config.max_seq_len, config.n_layers, config.recompute),
        config_(config.checked()),
        embedding(config.vocab_size, config.dim),
        positions(config.max_seq_len, config.dim),
        drop(config.dropout),
        norm(config.dim, config.norm_eps),
        head(config.tie_embeddings
                 ? Linear(embedding.weight)
                 : Linear(config.dim, config.vocab_size, {.bias = false, .is_streamed = true})) {
    for (std::int64_t i = 0; i < config_.n_layers; ++i) blocks.emplace_back(config_);
    transformer_.register_module("wte", embedding);
    transformer_.register_module("wpe", positions);
    transformer_.register_module("drop", drop);
    transformer_.register_module("h", blocks);
    transformer_.register_module("ln_f", norm);
    register_module("transformer", transformer_);
    register_module("lm_head", head);
    if (!device.is_meta()) materialize(device);
  }

  std::vector<Module*> parts() override {
    std::vector<Module*> parts;
    if (!config_.tie_embeddings) parts.push_back(&embedding);
    for (Gpt2Block& block : blocks) parts.push_back(&block);
    if (!config_.tie_embeddings) parts.push_back(&head);
    return parts;
  }
  // The linear layers of the blocks: Hugging Face's Conv1D.
  bool saves_transposed(std::string_view parameter) const override {
    return parameter.ends_with(".c_attn.weight") || parameter.ends_with(".c_proj.weight") ||
           parameter.ends_with(".c_fc.weight");
  }
  // Files of the model without its head, as the public ones, have no "transformer.".
  std::string_view optional_prefix() const override { return "transformer."; }
  // Masks of attention, which older versions of Hugging Face's model had as buffers.
  bool is_left_in_files(std::string_view name) const override {
    return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
  }
  const Gpt2Config& config() const noexcept { return config_; }

 protected:
  Tensor forward(const Tensor& tokens_BT) override {
    const KeyValueCache* const cache = KeyValueCache::current();
    const Tensor x_BTC = embedding(tokens_BT);
    if (cache && cache->positions().defined())
      return norm(run(blocks, drop(x_BTC + unsqueeze(positions(cache->positions()), 1))));
    return norm(run(blocks, drop(positions.add_positions(x_BTC))));
  }
  Product& output() override { return head.product; }

 private:
  Gpt2Config config_;
  Module transformer_;  // the level "transformer." of the names

 public:
  Embedding embedding;           // transformer.wte
  Embedding positions;           // transformer.wpe
  Dropout drop;                  // without parameters
  ModuleList<Gpt2Block> blocks;  // transformer.h
  LayerNorm norm;                // transformer.ln_f
  Linear head;                   // lm_head; without a parameter of its own when tied
};

}  // namespace tessera::nn
