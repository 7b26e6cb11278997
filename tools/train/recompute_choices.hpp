// What recomputation costs and saves: the lines of --dry-run that compare its choices.
#pragma once

#include <string>

#include "tools/train/config.hpp"

namespace tessera::train {

// The peak of rank 0 in a step, and what its compute stream does again, for activation_checkpoint's
// modes none, selective by operation, selective by blocks and full: a plan of each, run.
// `ranks` is the size of the world.
std::string compare_recompute(const Config& config, int ranks);

}  // namespace tessera::train
