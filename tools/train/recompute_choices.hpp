// What recomputation costs and saves: the lines of --dry-run that compare its choices.
#pragma once

#include <string>

#include "tools/train/config.hpp"

namespace tessera::train {

struct MemoryPlan;

// The peak of rank 0 in a step, and what its compute stream does again, for activation_checkpoint's
// modes none, selective by operation, selective by blocks and full: a plan of each, run, but for
// the config's own, of which rank 0 has `own`. `ranks` is the size of the world.
std::string compare_recompute(const Config& config, int ranks, const MemoryPlan& own);

}  // namespace tessera::train
