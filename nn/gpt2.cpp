#include "tessera/nn/gpt2.hpp"

#include "tessera/autograd/ops.hpp"

namespace tessera::nn {
namespace {

Gpt2Config checked(Gpt2Config c) {
  TESSERA_EXPECT(c.dim > 0 && c.n_layers >= 0 && c.n_heads > 0 && c.vocab_size > 0 &&
                     c.max_seq_len > 0 && c.ffn_dim >= 0,
                 "Gpt2: dim ", c.dim, ", n_layers ", c.n_layers, ", n_heads ", c.n_heads,
                 ", ffn_dim ", c.ffn_dim, ", vocab_size ", c.vocab_size, ", max_seq_len ",
                 c.max_seq_len, "; none may be negative or absent");
  TESSERA_EXPECT(c.dim % c.n_heads == 0, "Gpt2: dim ", c.dim, " is not a multiple of n_heads ",
                 c.n_heads);
  if (c.ffn_dim == 0) c.ffn_dim = checked_mul(4, c.dim);
  return c;
}

}  // namespace

Gpt2Block::Gpt2Block(const Gpt2Config& config, const Device& device)
    : ln_1(config.dim, config.norm_eps),
      attn(config.dim, config.n_heads),
      ln_2(config.dim, config.norm_eps),
      mlp(config.dim, checked(config).ffn_dim),
      drop(config.dropout) {
  register_module("ln_1", ln_1);
  register_module("attn", attn);
  register_module("ln_2", ln_2);
  register_module("mlp", mlp);
  register_module("drop", drop);
  if (!device.is_meta()) materialize(device);
}

Tensor Gpt2Block::operator()(const Tensor& x_BTC, Caller at) {
  const CallSite site(at);
  const auto forward = [&](const Tensor& in_BTC) {
    const SharedFp8Input shared;
    const auto [h_BTC, normed_BTC] =
        ln_2.of_sum(in_BTC, drop(attn(ln_1(in_BTC, attn.takes_rounded()))), mlp.takes_rounded());
    return drop.drops() ? h_BTC + drop(mlp(normed_BTC)) : mlp.add_to(h_BTC, normed_BTC);
  };
  return call(forward, x_BTC);
}

Gpt2::Gpt2(const Gpt2Config& config, const Device& device)
    : LanguageModel(config.vocab_size, config.max_seq_len, config.n_layers, config.recompute),
      config_(checked(config)),
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

std::vector<Module*> Gpt2::parts() {
  std::vector<Module*> parts;
  if (!config_.tie_embeddings) parts.push_back(&embedding);
  for (Gpt2Block& block : blocks) parts.push_back(&block);
  if (!config_.tie_embeddings) parts.push_back(&head);
  return parts;
}

bool Gpt2::saves_transposed(std::string_view parameter) const {
  return parameter.ends_with(".c_attn.weight") || parameter.ends_with(".c_proj.weight") ||
         parameter.ends_with(".c_fc.weight");
}

bool Gpt2::is_left_in_files(std::string_view name) const {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

Tensor Gpt2::forward(const Tensor& tokens_BT) {
  return norm(run(blocks, drop(positions.add_positions(embedding(tokens_BT)))));
}

}  // namespace tessera::nn
