// Calls that all ranks of a communicator make on the host, in one order.
#pragma once

#include "tests/emulator/nccl/state.hpp"

namespace tessera::nccl_double {

enum StepKind : int { kSplit, kRegister };

// Says that this rank has come to `step`, and whether all have; names who came to another call.
ncclResult_t meet(Comm& comm, std::uint64_t step, const Step& mine);
// What a rank came with, once all have met.
Step step_of(const Comm& comm, int peer, std::uint64_t step);

}  // namespace tessera::nccl_double
