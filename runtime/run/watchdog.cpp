#include "tessera/run/watchdog.hpp"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <utility>

#include "runtime/base/thread.hpp"
#include "runtime/base/wait.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"

namespace tessera {

struct Watchdog::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool ends = false;
  std::atomic<pid_t> parent{0};  // 0: none that matters, or gone
  Thread thread;
};

Watchdog::Watchdog(double timeout_seconds, std::function<int()> code)
    : state_(std::make_unique<State>()) {
  const std::chrono::duration<double> patience(1.25 * timeout_seconds + 1);
  Wait::set_exit_code(std::move(code));
  state_->thread = Thread([&state = *state_, patience] {
    constexpr std::chrono::milliseconds kLook{250};
    std::unique_lock lock(state.mutex);
    while (!state.changed.wait_for(lock, kLook, [&] { return state.ends; })) {
      if (const pid_t parent = state.parent; parent != 0 && ::getppid() != parent) {
        state.parent = 0;
        log(LogLevel::error, concat("process ", parent,
                                    ", the launcher that has started this one, "
                                    "is gone; this rank ends as by SIGTERM"));
        ::kill(::getpid(), SIGTERM);
      }
      const Wait::Overdue overdue = Wait::overdue(patience);
      if (!overdue.what) continue;
      log(LogLevel::error,
          concat(overdue.what, " for ", overdue.patience.count(), " s, ", overdue.why));
      ::_exit(Wait::exit_code());
    }
  });
}

void Watchdog::end_with_parent() { state_->parent = ::getppid(); }

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->ends = true;
  }
  state_->changed.notify_all();
  Wait::set_exit_code([] { return 1; });
}

}  // namespace tessera
