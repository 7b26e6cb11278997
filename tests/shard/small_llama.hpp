// A Llama with every kind of layer, whose two tables are streamed where a unit has them.
#pragma once

#include <cstdint>

#include "tessera/nn/llama.hpp"

namespace tessera::testing {

// 11 rows of the vocabulary are uneven on 2, 3 and 4 ranks.
inline constexpr std::int64_t kSmallWords = 11, kSmallLength = 4;

inline nn::LlamaConfig small_llama(std::int64_t layers,
                                   const nn::Recompute& recompute = nn::Recompute::none,
                                   bool tied = false) {
  return {.dim = 8,
          .n_layers = layers,
          .n_heads = 2,
          .n_kv_heads = 1,
          .ffn_dim = 12,
          .vocab_size = kSmallWords,
          .max_seq_len = kSmallLength,
          .tie_embeddings = tied,
          .recompute = recompute};
}

}  // namespace tessera::testing
