#include "runtime/base/wait.hpp"

#include <algorithm>
#include <utility>

namespace tessera {

// Never destroyed: threads may end after it.
Wait::All& Wait::all() {
  static All* const all = new All;
  return *all;
}

Wait::Wait(const char* what, std::function<std::uint64_t()> progress,
           std::chrono::duration<double> patience, const char* why)
    : what_(what), why_(why), progress_(std::move(progress)), patience_(patience) {
  const std::lock_guard lock(all().mutex);
  all().waits.push_back(this);
}

Wait::~Wait() {
  const std::lock_guard lock(all().mutex);
  std::erase(all().waits, this);
}

Wait::Overdue Wait::overdue(std::chrono::duration<double> patience) {
  constexpr std::chrono::duration<double> kMost{1};
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(all().mutex);
  const auto looked = std::exchange(all().looked, now);
  for (Wait* const wait : all().waits) {
    const std::chrono::duration<double> passed = now - std::max(looked, wait->begin_);
    const std::uint64_t progress = wait->progress_();
    const auto own = wait->patience_.count() > 0 ? wait->patience_ : patience;
    if (std::exchange(wait->seen_, progress) != progress)
      wait->age_ = {};
    else if ((wait->age_ += std::min(passed, kMost)) > own)
      return {wait->what_, own, wait->why_};
  }
  return {};
}

int Wait::exit_code() {
  std::function<int()> code;
  {
    const std::lock_guard lock(all().mutex);
    code = all().exit_code;
  }
  return code();
}

void Wait::set_exit_code(std::function<int()> code) {
  const std::lock_guard lock(all().mutex);
  all().exit_code = std::move(code);
}

}  // namespace tessera
