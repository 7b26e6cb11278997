// The makers of the executors, one for each kind; `make_executor` chooses.
#pragma once

#include <memory>

#include "runtime/device/tell_observers.hpp"
#include "tessera/device/executor.hpp"

namespace tessera {

std::unique_ptr<Executor> make_threaded(const ExecutorOptions& options, const Observers& observers);
std::unique_ptr<Executor> make_inline(const ExecutorOptions& options, const Observers& observers);
std::unique_ptr<Executor> make_cuda(const ExecutorOptions& options, const Observers& observers);
std::unique_ptr<Executor> make_virtual(const ExecutorOptions& options, const Observers& observers);

// How an executor says what it has carried out. Each call stands where that is so, not where it was
// asked for.
class Report {
 public:
  explicit Report(const Observers& observers) : observers_(observers) {}

  void launched(StreamId stream, Tick tick, const Op& op, const CollectiveBarrier* barrier) const {
    tell_observers(observers_, [stream, tick, &op, barrier](Observer& o) {
      o.executor_launched(stream, tick, op, barrier);
    });
  }
  void recorded(const Event& event) const {
    tell_observers(observers_, [&event](Observer& o) { o.executor_recorded(event); });
  }
  void waited(StreamId stream, const Event& event) const {
    tell_observers(observers_, [stream, &event](Observer& o) { o.executor_waited(stream, event); });
  }
  void blocked(const Event& event) const {
    tell_observers(observers_, [&event](Observer& o) { o.executor_blocked(event); });
  }

 private:
  const Observers& observers_;
};

}  // namespace tessera
