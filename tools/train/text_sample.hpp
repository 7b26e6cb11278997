// --sample: what the model writes behind a text.
#pragma once

#include <string>

#include "tessera/nn/language_model.hpp"
#include "tools/train/config.hpp"

namespace tessera::train {

// The text and --sample-tokens more, a byte a token, as valid UTF-8. Collective.
std::string continued_text(nn::LanguageModel& model, const Config& config);

}  // namespace tessera::train
