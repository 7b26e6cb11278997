// Calls that all ranks of a communicator make on the host, in one order.
#pragma once

#include "tests/emulator/nccl/state.hpp"

namespace tessera::nccl_double {

enum StepKind : int { kSplit, kRegister };

class Meeting {
 public:
  Meeting(Comm& comm, const Step& mine) : comm_(comm), mine_(mine) {}
  // Says that this rank has come, and whether all have; names who came to another call.
  ncclResult_t poll();
  // What a rank came with, once all have met.
  Step step_of(int peer) const { return comm_.board->slot(peer).last_steps[number_ % 2]; }
  std::uint64_t number() const { return number_; }

 private:
  Comm& comm_;
  const Step mine_;
  bool is_counted_ = false;
  std::uint64_t number_ = 0;  // of this rank's meetings on the communicator
};

}  // namespace tessera::nccl_double
