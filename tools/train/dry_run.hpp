// --dry-run: what a run would need, printed; nothing is trained.
#pragma once

#include <cstdint>
#include <string>

#include "tools/train/config.hpp"

namespace tessera::train {

// The plan of each kind of rank of a validated config, on stdout, with its timeline where one is
// asked for. Returns the exit code.  Throws: DeviceError when stdout can't be written.
int dry_run(const Config& config, int ranks);

// "1.50 MiB"
std::string mebibytes(std::int64_t bytes);

}  // namespace tessera::train
