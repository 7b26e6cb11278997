// activation_checkpoint: torchtitan's names for what backward computes again; see config.hpp.
#include <charconv>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tools/train/config.hpp"

namespace tessera::train {

nn::Recompute Config::ActivationCheckpoint::recompute() const {
  if (mode == RecomputeMode::none) return nn::Recompute::none;
  if (mode == RecomputeMode::full) return nn::Recompute::blocks;
  if (selective_ac_option == "op") return {.every = 1, .keep = {.products = 2, .attention = true}};
  if (selective_ac_option == "every_op")
    return {.every = 1, .keep = {.products = 1, .attention = true}};
  std::int64_t every = 0;
  const char* const end = selective_ac_option.data() + selective_ac_option.size();
  const auto [stop, error] = std::from_chars(selective_ac_option.data(), end, every);
  if (error != std::errc() || stop != end || every < 1)
    throw DataError(
        concat("activation_checkpoint.selective_ac_option=", shortened(selective_ac_option),
               ": expected op, every_op, or a whole number N of at least 1, which computes every "
               "N-th block again"));
  return {.every = every};
}

}  // namespace tessera::train
