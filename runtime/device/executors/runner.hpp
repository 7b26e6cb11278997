// What the executors share: running one body with all that belongs to it (observers, the two phases
// of a collective, the failure of an earlier body).
#pragma once

#include <array>
#include <exception>
#include <memory>

#include "runtime/device/executors/failure.hpp"
#include "tessera/device/executor.hpp"
#include "tessera/device/workers.hpp"

namespace tessera {

// An operation as executors keep it: what `Op` says about cost and accesses is for observers and
// gone by now.
struct Operation {
  const char* name = "";
  Tick tick = 0;
  StreamId stream = StreamId::compute;
  CollectiveBarrier* barrier = nullptr;
  const Body* body = nullptr;
};

// Runs bodies for one device. After a failure it runs none that comes after it, on its stream or by
// an event, and gives up the barriers that come up there so that no peer waits for this rank.
class Runner {
 public:
  Runner(const ExecutorOptions& options, const Observers& observers);
  ~Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  // The whole operation on the calling thread; blocks in `enter` and `leave` of a barrier. Never
  // throws.
  void run(const Operation& operation);

  // The pieces, for an executor that goes through the barrier itself. Each keeps what is thrown.
  void begin(const Operation& operation) {
    if (!observers_.empty()) [[unlikely]]
      begin_watched(operation);
  }
  void invoke(const Operation& operation, Exec::Phase phase);
  void end(const Operation& operation) {
    if (!observers_.empty()) [[unlikely]]
      end_watched(operation);
  }
  // Keeps `error` as the failure of `operation`, and aborts its barrier.
  void fail(const Operation& operation, std::exception_ptr error);
  // The operation of `tick` has failed too, or may have.
  void lose(StreamId stream, Tick tick) { failure_.lose(stream, tick, true); }
  // What is left of an operation after a failure.
  void skip(const Operation& operation);

  // What bodies on `stream` see beside the rank and the phase: the native stream, its workspace.
  Exec& exec_on(StreamId stream) { return execs_[index(stream)]; }

  // A stream has waited for an event of this clock.
  void follow(StreamId stream, const Clock& clock) { failure_.follow(stream, clock); }

  // What the stream comes to next is lost, if anything has failed.
  void reach(StreamId stream) {
    if (failure_.happened()) failure_.lose(stream, 0, false);
  }
  const Failure& failure() const noexcept { return failure_; }
  // See Executor::recover.
  Lost recover() { return failure_.forget(); }
  int rank() const noexcept { return rank_; }

 private:
  // Keeps what `f` throws as the failure of `operation`.
  template <class F>
  void keep_failure(const Operation& operation, const F& f);
  void begin_watched(const Operation& operation);
  void end_watched(const Operation& operation);
  void tell_started(const Operation& operation) const;
  void tell_finished(const Operation& operation) const;
  void run_collective(const Operation& operation);
  void call(const Operation& operation, Exec::Phase phase);

  int rank_;
  const Observers& observers_;
  std::unique_ptr<WorkerPool> workers_;  // null for one thread
  std::array<Exec, kMaxStreams> execs_;
  Failure failure_;
};

}  // namespace tessera
