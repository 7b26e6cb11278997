// Text from a language model, one token at a time, with a cache of keys and values.
//
//   const std::vector<nn::Prompt> prompts{{.tokens = {1, 5, 2}}, {.tokens = {7}, .seed = 1}};
//   for (const nn::Continuation& c : nn::generate(model, prompts, 64, {.top_p = 0.9}))
//     use(c.tokens);
//
//   std::vector<nn::Prompt> samples(8, prompt);           // of one prompt: each needs its own seed
//   for (std::uint64_t i = 0; i < 8; ++i) samples[i].seed = i;
//   nn::generate(model, samples, 64, {.seed = step});
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tessera/nn/language_model.hpp"

namespace tessera::nn {

struct SampleOptions {
  double temperature = 1;  // logits are divided by it; 0: the likeliest token
  std::int64_t top_k = 0;  // 0: among all tokens
  // Draws among the likeliest tokens of top_k whose probabilities add up to at least this part of
  // top_k's, above 0. 1: all of top_k.
  double top_p = 1;
  std::vector<std::int32_t> stop_tokens{};  // a sequence ends with the first of them
  std::uint64_t seed = 0;
  // Whether any rank goes on, given whether this one does. It is needed if ranks have different
  // prompts and there are stop tokens, since each token is a call of the model on every rank:
  //   [&](bool mine) { return world.sum(mine) > 0; }
  std::function<bool(bool)> goes_on{};
  // The module around the model, if its unit has parameters of the model. Each token is then a call
  // of it, too.
  Module* root = nullptr;
};

struct Prompt {
  std::vector<std::int32_t> tokens{};  // at least one
  // Each pair of this and SampleOptions::seed has draws of its own. Equal prompts with equal seeds
  // get equal tokens.
  std::uint64_t seed = 0;
};

struct Continuation {
  std::vector<std::int32_t> tokens{};  // at most `count`; the last may be a stop token
  // The log-probability of each token, in nats, by softmax(logits / temperature), before top_k and
  // top_p. At temperature 0 it is by softmax(logits).
  std::vector<float> log_probabilities{};
};

// Continues each prompt by `count` tokens, or up to a stop token. The prompts may have different
// lengths. A token is drawn from the softmax of the last position's logits / temperature. The draw
// depends on logits, seeds and the number of the token only. So ranks of a sharded model that give
// the same arguments get the same tokens. Ranks may give different prompts, with one `count`, and a
// rank may give none: it takes part in the calls. A dry run takes `count` tokens of each prompt, of
// no meaning.
//   The model runs in evaluation mode, once over all prompts and once for each further token. Each
// of these calls opens a unit once. With Reshard::never (set_reshard_after_forward) they open it
// once together. The host blocks for every token. Memory: keys and values of all layers for the
// longest prompt and `count` tokens of each sequence.
//   Throws: ContractError for an empty prompt, an id outside the vocabulary, bad options, more
// tokens than max_seq_len, and logits that are not finite.
std::vector<Continuation> generate(LanguageModel& model, std::span<const Prompt> prompts,
                                   std::int64_t count, const SampleOptions& options = {},
                                   Caller at = Caller::current());
// Continues one prompt.
std::vector<std::int32_t> generate(LanguageModel& model, std::span<const std::int32_t> prompt,
                                   std::int64_t count, const SampleOptions& options = {},
                                   Caller at = Caller::current());

}  // namespace tessera::nn
