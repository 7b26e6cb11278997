#include "tools/checkpoint/progress.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace tessera::checkpoint_tool {

Progress::Progress(const char* what, std::int64_t total_bytes)
    : what_(what),
      total_bytes_(total_bytes),
      is_terminal_(::isatty(STDERR_FILENO) == 1),
      next_((begin_ + kEach).time_since_epoch().count()) {}

Progress::~Progress() {
  if (is_terminal_ && has_printed_) std::fputs("\r\x1b[K", stderr);
}

void Progress::add(std::int64_t bytes) {
  const std::int64_t done = done_bytes_ += bytes;
  const Clock::time_point now = Clock::now();
  Clock::rep due = next_;
  if (now.time_since_epoch().count() < due ||
      !next_.compare_exchange_strong(due, (now + kEach).time_since_epoch().count()))
    return;
  has_printed_ = true;
  constexpr double kMiB = 1 << 20;
  const double seconds = std::chrono::duration<double>(now - begin_).count();
  std::fprintf(stderr, "%s%s: %.0f of %.0f MiB (%.0f %%), %.0f MiB/s%s", is_terminal_ ? "\r" : "",
               what_, static_cast<double>(done) / kMiB, static_cast<double>(total_bytes_) / kMiB,
               100.0 * static_cast<double>(done) /
                   static_cast<double>(std::max<std::int64_t>(total_bytes_, 1)),
               static_cast<double>(done) / kMiB / seconds, is_terminal_ ? "\x1b[K" : "\n");
}

}  // namespace tessera::checkpoint_tool
