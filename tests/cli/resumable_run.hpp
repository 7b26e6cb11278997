// A tiny run that saves checkpoints, so that another can go on where it was.
#pragma once

#include <string>

#include "tests/cli/program.hpp"
#include "tests/cli/tiny_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

namespace tessera::testing {

inline const std::string kResumed = kTiny + "--checkpoint.enable=true --checkpoint.interval=4 ",
                         kAsync = "--checkpoint.async_mode=async ";

inline Outcome run_well(const std::string& command, const TemporaryFolder& folder) {
  const Outcome run = run_command(command, folder.path().string());
  INFO(command << '\n' << run.out << run.err);
  REQUIRE(run.exit_code == 0);
  return run;
}

}  // namespace tessera::testing
