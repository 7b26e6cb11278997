// What a checkpoint says of the run that saved it, beside its tensors: configuration and data, with
// which a run that would go on there compares its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.hpp"
#include "tools/train/config.hpp"
#include "tools/train/inputs.hpp"

namespace tessera::train {

// Each is a text.
checkpoint::Scalars run_facts(const Config& config, const Inputs& inputs);

// What a run with another value is: the same, or one of which something can't go on.
enum class Makes : std::uint8_t { same_run, other_run, other_samples, other_state };

struct ChangedFact {
  std::string key, then, now;  // "model.dim", "16", "8"
  Makes makes;
};
// What `from` has otherwise than `now`, in the order of names.
// Throws: DataError for a fact of the checkpoint that is no text.
std::vector<ChangedFact> changed_facts(const checkpoint::Checkpoint& from,
                                       const checkpoint::Scalars& now);

}  // namespace tessera::train
