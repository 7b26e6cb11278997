// The race checker as a switch for users: TESSERA_CHECK=1 watches every rank of this process. See
// device/race_checker.hpp for what it finds. Called by `ts::run` and by the mains of tools/.
#pragma once

#include <memory>

#include "tessera/device/race_checker.hpp"
#include "tessera/run/environment.hpp"

namespace tessera {

// For WorldOptions::race_checker; null where TESSERA_CHECK is unset, empty or 0.
// Throws: DataError for a value that is neither 0 nor 1.
std::shared_ptr<RaceChecker> race_checker_from(const EnvironmentLookup& lookup);

}  // namespace tessera
