// How far a command has come, on stderr, from two seconds on: one line that is written anew on a
// terminal, and a line every two seconds elsewhere.
// Threads: free for all.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera::checkpoint_tool {

class Progress {
 public:
  // `what` is its first word, as "verify".
  Progress(const char* what, std::int64_t total_bytes);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  void add(std::int64_t bytes);

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kEach{2000};

  const char* what_;
  const std::int64_t total_bytes_;
  const Clock::time_point begin_ = Clock::now();
  const bool is_terminal_;
  std::atomic<std::int64_t> done_bytes_{0};
  std::atomic<Clock::rep> next_;  // when a line is due
  std::atomic<bool> has_printed_{false};
};

}  // namespace tessera::checkpoint_tool
