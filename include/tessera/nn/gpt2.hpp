// GPT-2: a decoder with LayerNorm, learned positions and GELU, its head tied to the embedding.
// Parameters bear Hugging Face's names.  Source: Radford et al., "Language models are unsupervised
// multitask learners", 2019.
#pragma once

#include "tessera/nn/attention.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/nn/language_model.hpp"
#include "tessera/nn/mlp.hpp"
#include "tessera/nn/module_list.hpp"
#include "tessera/nn/norm.hpp"

namespace tessera::nn {

struct Gpt2Config {
  std::int64_t dim = 256, n_layers = 6, n_heads = 8;
  std::int64_t ffn_dim = 0;  // 0: 4 dim
  std::int64_t vocab_size = 256, max_seq_len = 1024;
  double norm_eps = 1e-5;
  // Of the embeddings and of what each branch adds; attention weights are not dropped.
  double dropout = 0;
  bool tie_embeddings = true;
  Recompute recompute = Recompute::none;
};

// One layer; a good unit for fully_shard.
class Gpt2Block : public Module {
 public:
  explicit Gpt2Block(const Gpt2Config& config, const Device& device = Device::meta());
  // x_BTC -> [B, T, C].
  Tensor operator()(const Tensor& x_BTC, Caller at = Caller::current());

  LayerNorm ln_1;
  FusedAttention attn;
  LayerNorm ln_2;
  GeluMlp mlp;
  Dropout drop;
};

class Gpt2 : public LanguageModel {
 public:
  // Throws: ContractError naming the field that does not fit.
  explicit Gpt2(const Gpt2Config& config, const Device& device = Device::meta());

  std::vector<Module*> parts() override;
  // The linear layers of the blocks: Hugging Face's Conv1D.
  bool saves_transposed(std::string_view parameter) const override;
  // Files of the model without its head, as the public ones, have no "transformer.".
  std::string_view optional_prefix() const override { return "transformer."; }
  // Masks of attention, that older versions of Hugging Face's model had as buffers.
  bool is_left_in_files(std::string_view name) const override;
  const Gpt2Config& config() const noexcept { return config_; }

 protected:
  Tensor forward(const Tensor& tokens_BT) override;
  Linear& output() override { return head; }

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
