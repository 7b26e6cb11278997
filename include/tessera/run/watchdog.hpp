// Ends a process in which a thread that others wait for stands still: in a kernel that never
// returns, or stopped from outside. Nobody can end such a thread, and who joins it waits for ever.
// Peers that wait for a rank in a collective have an error of their own, sooner; what the program
// does itself on a rank's thread, in a hook or a data set, takes as long as it likes. `run` has
// one.
#pragma once

#include <functional>
#include <memory>

namespace tessera {

class Watchdog {
 public:
  // Where a thread of the process has waited for its device, for a stream's thread to end, or,
  // after a failure, for the other ranks, and none of those has got on for a quarter longer than
  // `timeout_seconds` (WorldOptions) and a second, logs an error and calls _exit(code()).
  // Throws: std::system_error where the system has no thread left.
  Watchdog(double timeout_seconds, std::function<int()> code);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
