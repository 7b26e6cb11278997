#include "tessera/run/watchdog.hpp"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
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
  Thread thread;
};

Watchdog::Watchdog(double timeout_seconds, std::function<int()> code)
    : state_(std::make_unique<State>()) {
  const std::chrono::duration<double> patience(1.25 * timeout_seconds + 1);
  Wait::set_exit_code(std::move(code));
  state_->thread = Thread([&state = *state_, patience] {
    std::unique_lock lock(state.mutex);
    while (!state.changed.wait_for(lock, patience / 20, [&] { return state.ends; })) {
      const char* const what = Wait::overdue(patience);
      if (!what) continue;
      log(LogLevel::error,
          concat(what, " for ", patience.count(), " s, and nothing moved: a thread hangs"));
      ::_exit(Wait::exit_code());
    }
  });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->ends = true;
  }
  state_->changed.notify_all();
  Wait::set_exit_code([] { return 1; });
}

}  // namespace tessera
