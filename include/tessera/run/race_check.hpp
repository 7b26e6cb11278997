// The race checker as a switch for users: TESSERA_CHECK=1 watches every rank of this process.
// device/observe/race_checker.hpp says what it finds. `ts::run` and the mains of tools/ call this.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "tessera/device/observe/race_checker.hpp"
#include "tessera/run/environment.hpp"

namespace tessera {

// A checker for WorldOptions::race_checker; null if TESSERA_CHECK is unset, empty or 0.
// Throws: DataError for a value that is neither 0 nor 1.
std::shared_ptr<RaceChecker> race_checker_from(const EnvironmentLookup& lookup);

// Called at the end of a program that would end with `code`. Each race goes to `race` as one line;
// on rank 0 the summary goes to `summary`. Returns the exit code: a race makes a 0 a 1. Without a
// checker it is `code`, and nothing is said.
int close_check(const RaceChecker* checker, int rank, int code,
                const std::function<void(const std::string&)>& race,
                const std::function<void(const std::string&)>& summary);

}  // namespace tessera
