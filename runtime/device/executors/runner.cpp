#include "runtime/device/executors/runner.hpp"

#include <utility>

#include "runtime/base/wait.hpp"
#include "runtime/device/tell_observers.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/base/text.hpp"

namespace tessera {

Runner::Runner(const ExecutorOptions& options, const Observers& observers)
    : rank_(options.rank), observers_(observers) {
  if (options.threads > 1) workers_ = std::make_unique<WorkerPool>(options.threads);
  for (const StreamId stream : kStreams) {
    Exec& exec = exec_on(stream);
    exec.driver = options.driver;
    exec.workers = workers_.get();
    exec.stream = stream;
    exec.rank = rank_;
  }
}

Runner::~Runner() {
  const Wait wait("a worker thread did not end", [] { return 0; });
  workers_.reset();
}

void Runner::call(const Operation& operation, Exec::Phase phase) {
  Exec exec = execs_[index(operation.stream)];
  exec.phase = phase;
  operation.body->invoke(operation.body->bytes, exec);
  if (exec.error)
    throw DeviceError(concat("'", operation.name, "' on stream ", name(operation.stream),
                             " was refused: ", exec.error));
  if (exec.note) [[unlikely]]
    log(LogLevel::warning, concat(operation.name, ": ", exec.note));
}

template <class F>
void Runner::keep_failure(const Operation& operation, const F& f) {
  try {
    f();
  } catch (...) {
    fail(operation, std::current_exception());
  }
}

void Runner::run(const Operation& operation) {
  if (failure_.reaches(operation.stream)) return skip(operation);
  const bool is_watched = !observers_.empty();  // asked once: of each operation it is a cost
  keep_failure(operation, [&] {
    if (is_watched) [[unlikely]]
      tell_started(operation);
    if (operation.barrier == nullptr)
      call(operation, Exec::Phase::run);
    else
      run_collective(operation);
    if (is_watched) [[unlikely]]
      tell_finished(operation);
  });
}

// One that throws hears of its peers' end all the same: they may still be reading its bytes.
void Runner::run_collective(const Operation& operation) {
  call(operation, Exec::Phase::publish);
  operation.barrier->enter();
  keep_failure(operation, [&] { call(operation, Exec::Phase::run); });
  operation.barrier->leave();
}

void Runner::begin_watched(const Operation& operation) {
  keep_failure(operation, [&] { tell_started(operation); });
}

void Runner::invoke(const Operation& operation, Exec::Phase phase) {
  if (!failure_.reaches(operation.stream)) keep_failure(operation, [&] { call(operation, phase); });
}

void Runner::end_watched(const Operation& operation) {
  if (!failure_.reaches(operation.stream))
    keep_failure(operation, [&] { tell_finished(operation); });
}

void Runner::tell_started(const Operation& operation) const {
  tell_observers(observers_, [&operation](Observer& o) {
    o.started(operation.stream, operation.tick, operation.name);
  });
}

void Runner::tell_finished(const Operation& operation) const {
  tell_observers(observers_, [&operation](Observer& o) {
    o.finished(operation.stream, operation.tick, operation.name);
  });
}

void Runner::fail(const Operation& operation, std::exception_ptr error) {
  failure_.keep(std::move(error), rank_, operation.stream, operation.name);
  failure_.lose(operation.stream, operation.tick, true);
  if (operation.barrier != nullptr) operation.barrier->give_up(failure_.reason());
}

void Runner::skip(const Operation& operation) {
  failure_.lose(operation.stream, operation.tick, false);
  if (operation.barrier != nullptr) operation.barrier->give_up(failure_.reason());
}

}  // namespace tessera
