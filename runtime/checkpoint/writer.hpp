// The thread that writes a rank's part of a save, for one piece of work at a time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>

#include "runtime/base/thread.hpp"

namespace tessera::checkpoint {

class Writer {
 public:
  // Requires: what was begun before has ended by `end`. Where the system has no thread left, that
  // is what the work throws.
  void begin(const std::function<void()>& work);
  // Whether nothing is left of it; and that it has thrown.
  bool is_done() const;
  bool has_failed() const;
  // Until it is done, or for that time.
  void wait_for(std::chrono::steady_clock::duration time) const;
  // Waits for the end of the work; returns what it threw, null for nothing.
  std::exception_ptr end();

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  bool is_done_ = true;
  std::exception_ptr failure_;
  Thread thread_;  // last: joined first
};

}  // namespace tessera::checkpoint
