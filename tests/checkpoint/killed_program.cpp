// Loaded into a program (LD_PRELOAD), it sends that a signal at a call of the system below a
// folder: KILL_AT="SIGNAL RANK CALL FOLDER", where RANK is Open MPI's, or 0 without it, and CALL
// counts from 1 on. Without a rank of that number the calls are made as ever.
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>

#include "tests/checkpoint/system_calls.hpp"

namespace tessera::testing {
namespace {

std::unique_ptr<CallWatch> watch_of_program() {
  const char* const plan = std::getenv("KILL_AT");
  const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (!plan) return nullptr;
  CallFault fault;
  std::string folder;
  std::istringstream(plan) >> fault.signal >> fault.rank >> fault.at >> folder;
  CallWatch::set_rank_of_process(rank ? std::atoi(rank) : 0);
  return std::make_unique<CallWatch>(folder, fault);
}

const std::unique_ptr<CallWatch> watched = watch_of_program();

}  // namespace
}  // namespace tessera::testing
