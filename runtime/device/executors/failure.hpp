// What a device keeps of a failure: what was thrown, and what it kept from running.
#pragma once

#include <array>
#include <atomic>
#include <exception>
#include <mutex>
#include <string>

#include "tessera/device/executor.hpp"

namespace tessera {

// The first exception that a body of this device threw. Any thread captures; the host thread
// rethrows, every time. It reaches the streams that something was lost on, and those that wait for
// such an operation: what needs nothing of it runs.
class Failure {
 public:
  // Keeps `error` if it is the first. `what` names the operation and the rank for peers that hear
  // of it.
  void keep(std::exception_ptr error, int rank, StreamId stream, const char* name);

  bool happened() const noexcept { return happened_.load(std::memory_order_acquire); }
  void rethrow() const;  // returns when nothing happened
  // An operation failed, or is skipped after a failure; of tick 0: none, but its stream is reached.
  void lose(StreamId stream, Tick tick, bool has_failed);
  // Whether what the stream comes to next is lost.
  bool reaches(StreamId stream) const noexcept {
    return reached_[index(stream)].load(std::memory_order_acquire);
  }
  // The stream has waited for all of `clock`.
  void follow(StreamId stream, const Clock& clock);
  // Forgets all, and returns what was lost.
  Lost forget();
  // One line for the peers.  Requires: happened().
  std::string reason() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> happened_{false};
  std::array<std::atomic<bool>, kMaxStreams> reached_{};
  std::exception_ptr error_;
  std::string reason_;
  Lost lost_;
};

}  // namespace tessera
