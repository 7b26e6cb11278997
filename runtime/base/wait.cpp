#include "runtime/base/wait.hpp"

#include <utility>

namespace tessera {

// Never destroyed: threads may end after it.
Wait::All& Wait::all() {
  static All* const all = new All;
  return *all;
}

Wait::Wait(const char* what, std::function<std::uint64_t()> progress)
    : what_(what), progress_(std::move(progress)) {
  const std::lock_guard lock(all().mutex);
  all().waits.push_back(this);
}

Wait::~Wait() {
  const std::lock_guard lock(all().mutex);
  std::erase(all().waits, this);
}

const char* Wait::overdue(std::chrono::duration<double> patience) {
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(all().mutex);
  const bool was_stopped = now - std::exchange(all().looked, now) > patience / 10;
  for (Wait* const wait : all().waits) {
    const std::uint64_t progress = wait->progress_();
    if (progress != wait->seen_ || was_stopped) {
      wait->seen_ = progress;
      wait->since_ = now;
    } else if (now - wait->since_ > patience) {
      return wait->what_;
    }
  }
  return nullptr;
}

}  // namespace tessera
