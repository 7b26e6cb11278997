// The file by which torchrun learns why a process of its job has failed: its summary then shows our
// line where it else says that there is no trace.
#pragma once

#include <string_view>

#include "tessera/run/environment.hpp"

namespace tessera {

// Writes `message` to TORCHELASTIC_ERROR_FILE; nothing where that is not set. A file that can't be
// written is a line in the log: the failure itself must still be told.
void write_error_file(const EnvironmentLookup& lookup, std::string_view message) noexcept;

}  // namespace tessera
