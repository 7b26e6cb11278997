// Runs a shell command as a user would, with a folder and an environment of its own, and catches
// all that comes back.
#pragma once

#include <csignal>
#include <map>
#include <string>

namespace tessera::testing {

struct Outcome {
  int exit_code = 0;  // 128 + signal where one ended it
  std::string out, err;
  double computed_seconds = 0;  // of processors, also by what the command has started
};

// Requires TESSERA_TRAIN, the path of the binary, whose folder comes first in PATH. `variables` is
// the rest of the environment; unless it says otherwise the race checker watches, and a race makes
// the exit code 1. Throws: std::runtime_error where no process can be made.
Outcome run_command(const std::string& command, const std::string& folder,
                    const std::map<std::string, std::string>& variables = {});

}  // namespace tessera::testing
