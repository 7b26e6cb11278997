// Text from a language model, one token at a time.
#pragma once

#include <span>
#include <vector>

#include "tessera/nn/language_model.hpp"

namespace tessera::nn {

struct SampleOptions {
  double temperature = 1;  // 0: the likeliest token
  std::int64_t top_k = 0;  // 0: among all tokens
  std::uint64_t seed = 0;
};

// `count` tokens that follow `prompt`, each drawn from the softmax of the last position's logits /
// temperature. The model runs over the last max_seq_len tokens each time, in evaluation mode. The
// draw depends on logits, seed and position only, so the ranks of a sharded model, which all call
// this with the same arguments, get the same tokens. The host blocks for every token.
// Throws: ContractError for an empty prompt, an id outside the vocabulary, bad options, or where no
// values exist.
std::vector<std::int32_t> generate(LanguageModel& model, std::span<const std::int32_t> prompt,
                                   std::int64_t count, const SampleOptions& options = {});

}  // namespace tessera::nn
