// What a device keeps of a failure: what was thrown, and what it kept from running.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <string>

#include "tessera/device/executor.hpp"

namespace tessera {

// The first exception that a body of this device threw. Any thread captures; the host thread
// rethrows, every time.
class Failure {
 public:
  // Keeps `error` if it is the first. `what` names the operation and the rank for peers that hear
  // of it.
  void keep(std::exception_ptr error, int rank, StreamId stream, const char* name);

  bool happened() const noexcept { return happened_.load(std::memory_order_acquire); }
  void rethrow() const;  // returns when nothing happened
  // An operation failed, or is skipped after a failure.
  void lose(StreamId stream, Tick tick, bool has_failed);
  // Forgets all, and returns what was lost.
  Lost forget();
  // One line for the peers.  Requires: happened().
  std::string reason() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> happened_{false};
  std::exception_ptr error_;
  std::string reason_;
  Lost lost_;
};

}  // namespace tessera
