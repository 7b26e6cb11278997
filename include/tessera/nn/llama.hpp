// Llama: a decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU. Parameters
// bear Hugging Face's names. Source: Touvron et al., "LLaMA: open and efficient foundation language
// models", 2023.
//
//   tokens ─ embedding ─┬─ norm ─ attention ─ + ─┬─ norm ─ mlp ─ + ─ ... ─ norm ─ head ─ logits
//                       └─────────────────────┘  └─────────────┘  n_layers times
#pragma once

#include "tessera/nn/attention.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/nn/language_model.hpp"
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
};
static_assert(LlamaConfig::default_ffn_dim(128) == 352 && LlamaConfig::default_ffn_dim(96) == 256);

// One layer; a good unit for fully_shard.
class LlamaBlock : public Module {
 public:
  LlamaBlock(const LlamaConfig& config, std::shared_ptr<Rotary> rotary,
             const Device& device = Device::meta());
  // x_BTC -> [B, T, C].
  Tensor operator()(const Tensor& x_BTC, Caller at = Caller::current());

  RMSNorm input_layernorm;
  GroupedQueryAttention self_attn;
  RMSNorm post_attention_layernorm;
  SwigluMlp mlp;
};

class Llama : public LanguageModel {
 public:
  // Throws: ContractError naming the field that does not fit.
  explicit Llama(const LlamaConfig& config, const Device& device = Device::meta());

  std::vector<Module*> parts() override;
  std::string_view optional_prefix() const override { return "model."; }
  // Frequencies of rotary positions, that older versions of Hugging Face's model had as buffers.
  bool is_left_in_files(std::string_view name) const override {
    return name.ends_with(".rotary_emb.inv_freq");
  }
  const LlamaConfig& config() const noexcept { return config_; }

 protected:
  Tensor forward(const Tensor& tokens_BT) override;
  Linear& output() override { return head; }

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
