#include "runtime/comm/poll_thread.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

#include "runtime/base/wait.hpp"
#include "tessera/base/error.hpp"

namespace tessera::comm {

PollThread::PollThread(std::vector<int> descriptors, std::function<void(int)> look)
    : look_(std::move(look)), stop_(eventfd(0, EFD_CLOEXEC)) {
  if (stop_ < 0)
    throw DeviceError(
        "World: the system has no file descriptor left for the watch thread; raise the limit "
        "(ulimit -n)");
  thread_ = Thread([this, d = std::move(descriptors)]() mutable { run(std::move(d)); });
}

PollThread::~PollThread() {
  const std::uint64_t one = 1;
  static_cast<void>(!write(stop_, &one, sizeof one));
  const Wait wait("a watch thread did not end", [] { return 0; });
  thread_.join();
  close(stop_);
}

// A descriptor that stays readable is taken out (poll passes over negative ones), or the thread
// would never sleep again.
void PollThread::run(std::vector<int> descriptors) noexcept {
  std::vector<pollfd> polled{{stop_, POLLIN, 0}};
  for (const int d : descriptors) polled.push_back({d, POLLIN, 0});
  for (;;) {
    const int ready = poll(polled.data(), polled.size(), kLookEveryMs);
    if (ready > 0 && polled[0].revents != 0) return;
    for (std::size_t i = 1; ready > 0 && i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      polled[i].fd = -1;
      look_(static_cast<int>(i) - 1);
    }
    if (ready <= 0) look_(-1);
  }
}

}  // namespace tessera::comm
