// A stream of the shuffled executor as ThreadSanitizer sees it: a fiber with a clock of its own,
// that learns only what events, submission and collectives tell it. Then every real load and store
// of the bodies is checked under exactly our edges, whatever they declare.
//
//   host     submitted(7) ─┐ release
//   compute      acquire ──┴─ run ── finished(7) ─┐ release
//   gather                                acquire ┴─ learn(compute, 7) ── run
//
// Twins: tsan_fiber.cpp under -Db_sanitize=thread, no_fiber.cpp otherwise, where a body is called
// and nothing else happens. tsan_fiber.cpp itself is compiled without the sanitizer: the baton and
// the queues must not look like edges.
#pragma once

#include <memory>

#include "tessera/device/op.hpp"

namespace tessera::schedules {

class StreamFiber {
 public:
  StreamFiber();
  // Requires: the caller may know all that ran, as the end of a device does.
  ~StreamFiber();
  StreamFiber(const StreamFiber&) = delete;
  StreamFiber& operator=(const StreamFiber&) = delete;

  // On the host's thread: what it knows now, the operation of this tick will know.
  void submitted(Tick tick);
  // Runs a body of the operation of `tick` as this stream.  Throws: what the body throws.
  void run(Tick tick, const Body& body, Exec& exec);
  // From here on others can learn what this stream knew at the end of `tick`.
  void finished(Tick tick);
  // This stream waits for an operation of another stream, or of itself.
  void learn(StreamFiber& other, Tick tick);
  // The calling thread, a host, waits for one.
  void teach_caller(Tick tick);
  // A barrier of several streams: all arrive, then all leave.
  void arrive(const void* barrier);
  void leave(const void* barrier);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::schedules
