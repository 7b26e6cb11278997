#include "tools/train/text_sample.hpp"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/detail/base/utf8.hpp"
#include "tessera/nn/generate.hpp"

namespace tessera::train {

std::string continued_text(nn::LanguageModel& model, const Config& config) {
  std::vector<std::int32_t> text;
  for (const char c : config.flags.sample) text.push_back(static_cast<unsigned char>(c));
  // What comes behind max_seq_len tokens continues the last half of so many.
  const auto most = static_cast<std::size_t>(model.max_seq_len());
  const std::size_t end = text.size() + static_cast<std::size_t>(config.flags.sample_tokens);
  while (text.size() < end) {
    const std::size_t context = text.size() < most ? text.size() : (most + 1) / 2,
                      count = std::min(end - text.size(), most - context + 1);
    const std::vector<std::int32_t> more =
        nn::generate(model, std::span(text).last(context), static_cast<std::int64_t>(count),
                     {.temperature = 0.8,
                      .top_k = 40,
                      .seed = static_cast<std::uint64_t>(config.debug.seed) + text.size()});
    text.insert(text.end(), more.begin(), more.end());
  }
  std::string bytes;
  for (const std::int32_t t : text) bytes += static_cast<char>(t);
  return as_utf8(bytes);
}

}  // namespace tessera::train
