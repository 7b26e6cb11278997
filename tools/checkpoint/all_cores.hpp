// Work in many equal parts on all cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/base/thread.hpp"

namespace tessera::checkpoint_tool {

// Calls f(i) for each i below `count`, in that order but several at once. Each thread makes an f of
// its own by `make`, with what is not free for all.
// Throws: what the first call has thrown that did, when all threads have ended.
template <class Make>
void on_all_cores(std::size_t count, const Make& make) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;  // of what follows
  std::exception_ptr failed;
  std::size_t failed_at = count;
  const auto work = [&] {
    std::size_t i = 0;
    try {
      auto f = make();
      while ((i = next++) < count) f(i);
    } catch (...) {
      const std::scoped_lock lock(mutex);
      if (!failed || i < failed_at) failed = std::current_exception();
      failed_at = std::min(failed_at, i);
      next = count;  // the others end with what they are at
    }
  };
  {
    std::vector<Thread> threads;
    const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
    for (std::size_t i = 0; i < std::min(cores, count); ++i) threads.emplace_back(work);
  }
  if (failed) std::rethrow_exception(failed);
}

}  // namespace tessera::checkpoint_tool
