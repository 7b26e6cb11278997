// The run itself: world, model, loop, plan and sample, for a configuration that has been read and
// checked.
#pragma once

#include <memory>

#include "tessera/device/observe/race_checker.hpp"
#include "tessera/run/environment.hpp"
#include "tools/train/config.hpp"

namespace tessera::train {

// Returns the exit code: 0, or 128 + signal after an orderly stop. `race_checker` watches all ranks
// of this process; null for none.
// Throws: Error; DataError is bad input, whatever else is a failure.
int train(const Config& config, const LaunchEnvironment& environment,
          const std::shared_ptr<RaceChecker>& race_checker);

}  // namespace tessera::train
