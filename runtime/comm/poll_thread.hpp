// A thread that looks after a world every 100 ms, and at once when one of some file descriptors
// becomes readable. It sees what a rank that waits or computes can't: time that passes, peers that
// are gone, a wish for the flight record.
#pragma once

#include <functional>
#include <vector>

#include "runtime/base/thread.hpp"

namespace tessera::comm {

inline constexpr int kLookEveryMs = 100;

class PollThread {
 public:
  // `look(i)` with the index of the descriptor that has become readable, once for each, or -1 when
  // the time is over. It must not throw. Descriptors are the caller's.
  PollThread(std::vector<int> descriptors, std::function<void(int ready)> look);
  ~PollThread();  // no look is under way any more
  PollThread(const PollThread&) = delete;
  PollThread& operator=(const PollThread&) = delete;

 private:
  void run(std::vector<int> descriptors) noexcept;

  std::function<void(int)> look_;
  int stop_;  // readable when the thread is to end
  Thread thread_;
};

}  // namespace tessera::comm
