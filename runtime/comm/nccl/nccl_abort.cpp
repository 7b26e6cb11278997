#include "runtime/comm/nccl/nccl_abort.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>

#include "runtime/base/thread.hpp"
#include "runtime/base/wait.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

// Kernels look for an abort all the time, and peers hear of a failure within 0.3 s; the rest is for
// NCCL to give its memory back. Of the time between two looks at most kLook counts twice, so that a
// process that was stopped, or has no processor, goes on.
constexpr std::chrono::milliseconds kAbortWithin = 2s, kLook = 20ms;

}  // namespace

void abort_in_time(const std::string& why, const std::function<void()>& abort) noexcept {
  using Clock = std::chrono::steady_clock;
  std::mutex mutex;
  std::condition_variable changed;
  bool is_back = false;
  Thread thread;
  try {
    thread = Thread([&] {
      abort();
      const std::lock_guard lock(mutex);
      is_back = true;
      changed.notify_all();
    });
  } catch (const std::system_error&) {  // no thread is left
    return abort();
  }
  std::unique_lock lock(mutex);
  for (Clock::duration waited{}; waited < kAbortWithin;) {
    const auto begin = Clock::now();
    if (changed.wait_for(lock, kLook, [&] { return is_back; })) return;
    waited += std::min<Clock::duration>(Clock::now() - begin, 2 * kLook);
  }
  log(LogLevel::error,
      concat("World::nccl: the process ends: NCCL's abort has not come back in ",
             std::chrono::duration<double>(kAbortWithin).count(), " s; it followed this: ", why));
  ::_exit(Wait::exit_code());
}

}  // namespace tessera::comm
