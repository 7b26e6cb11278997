// What the scripts of tests/golden and the tests of trainings share: files, and the formulas that
// both sides compute weights and tokens by.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/philox.hpp"
#include "tessera/nn/llama.hpp"
#include "tests/support/catch.hpp"

namespace tessera::testing {

inline nlohmann::json read_golden(const std::string& name) {
  std::ifstream file(std::string(GOLDEN_FOLDER) + "/" + name);
  REQUIRE(file);
  return nlohmann::json::parse(file);
}

// splitmix64 of key + i (Steele, Lea and Flood, 2014).
inline std::uint64_t bits(std::uint64_t key, std::uint64_t i) {
  std::uint64_t z = (key + i) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

inline float weight(std::uint64_t key, std::uint64_t i, bool is_norm) {
  const double unit = static_cast<double>(bits(key, i) >> 40) * 0x1p-23 - 1;
  return static_cast<float>((is_norm ? 1.0 : 0.0) + unit / 16);
}

// The formula's values, which are laid out as Hugging Face does.
inline void set_weights(nn::LanguageModel& model, int seed) {
  for (const auto& [name, parameter] : model.named_parameters()) {
    const Shape& shape = parameter.shape();
    const bool is_norm = shape.ndim() == 1 && name.ends_with("weight");
    const bool transposed = model.saves_transposed(name);
    std::vector<float> values(static_cast<std::size_t>(shape.numel()));
    auto next = values.begin();
    for (const auto& [part, rows] : named_row_parts(name, parameter)) {
      const std::uint64_t key = fnv1a(std::to_string(seed) + " " + part);
      const std::int64_t count = rows * shape.numel() / shape[0];
      for (std::int64_t i = 0; i < count; ++i)
        *next++ = weight(key, static_cast<std::uint64_t>(i), is_norm);
    }
    Tensor theirs = Tensor::from(values, transposed ? Shape{shape[1], shape[0]} : shape,
                                 parameter.shard().device());
    if (transposed) theirs = raw::transpose(theirs, 0, 1);
    parameter.assign(theirs);
  }
}

inline nn::LlamaConfig llama_config(const nlohmann::json& c) {
  return {.dim = c["dim"],
          .n_layers = c["n_layers"],
          .n_heads = c["n_heads"],
          .n_kv_heads = c["n_kv_heads"],
          .ffn_dim = c["ffn_dim"],
          .vocab_size = c["vocab_size"],
          .max_seq_len = c["max_seq_len"],
          .rope_theta = c["rope_theta"],
          .norm_eps = c["norm_eps"]};
}

}  // namespace tessera::testing
