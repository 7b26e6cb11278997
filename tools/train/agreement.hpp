// What ranks must agree on before the first step, and the look at the data that they share.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/comm/world.hpp"
#include "tools/train/config.hpp"
#include "tools/train/inputs.hpp"

namespace tessera::train {

// Collective. Processes read their options and files each on its own, and shards of different
// models would mix silently.  Throws: DataError that names the first difference, on every rank.
void check_agreement(const Config& config, const Inputs& inputs, const World& world);

// Of the file's size and of blocks spread over it; "none" without data.
std::string data_fingerprint(const Inputs& inputs);

// Looks at every token once, so that a bad id ends the run before it begins: this process at all of
// them, or, collectively, at its rank's part of what the ranks of `world` share. The first rank
// says how far it is when it takes long. Returns at how many this rank has looked.  Throws:
// DataError for the first bad id, on every rank.
std::int64_t look_at_tokens(const Inputs& inputs, const World* world = nullptr);

}  // namespace tessera::train
