#include "runtime/checkpoint/writer.hpp"

#include <system_error>
#include <utility>

#include "runtime/base/held_signals.hpp"
#include "tessera/base/error.hpp"

namespace tessera::checkpoint {

void Writer::begin(const std::function<void()>& work) {
  is_done_ = false;
  const auto run = [this, work] {
    std::exception_ptr failure;
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    failure_ = failure;
    is_done_ = true;
    ended_.notify_all();
  };
  const HeldSignals held;  // they are for the program's threads
  try {
    thread_ = Thread(run);
  } catch (const std::system_error& error) {
    failure_ = std::make_exception_ptr(DeviceError(concat(
        "checkpoint: the thread that writes for this rank could not be started: ", error.what(),
        "; use fewer ranks, or raise the limit (ulimit -u, -v)")));
    is_done_ = true;
  }
}

bool Writer::is_done() const {
  const std::lock_guard lock(mutex_);
  return is_done_;
}

bool Writer::has_failed() const {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

void Writer::wait_for(std::chrono::steady_clock::duration time) const {
  std::unique_lock lock(mutex_);
  ended_.wait_for(lock, time, [&] { return is_done_; });
}

std::exception_ptr Writer::end() {
  thread_.join();
  return std::exchange(failure_, nullptr);
}

}  // namespace tessera::checkpoint
