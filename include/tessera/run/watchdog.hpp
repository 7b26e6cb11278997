// Ends a process in which a thread that others wait for stands still: in a kernel that never
// returns, or stopped from outside. Nobody can end such a thread, and a join of it waits for ever.
// Peers that wait for a rank in a collective have an error of their own, which comes sooner. The
// program's own work on a rank's thread, in a hook or a data set, may take as long as it likes.
// `run` has a watchdog.
#pragma once

#include <functional>
#include <memory>

namespace tessera {

class Watchdog {
 public:
  // Logs an error and calls _exit(code()) when a thread of the process has waited too long: for its
  // device, for a stream's thread to end, or for the other ranks after a failure. Too long is one
  // second plus 1.25 times `timeout_seconds` (WorldOptions), without progress of what it waits for.
  // For the other ranks of World::mpi to come together it is `init_timeout_seconds`.
  //   Throws: std::system_error if the system has no thread left.
  Watchdog(double timeout_seconds, std::function<int()> code);
  // If the process that has started this one ends, logs an error, and then sends SIGTERM to this
  // process, once.
  void end_with_parent();
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
