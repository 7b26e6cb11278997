#include "tools/train/signals.hpp"

#include <unistd.h>

#include <atomic>

namespace tessera::train {
namespace {

std::atomic<int> g_requested{0};
static_assert(std::atomic<int>::is_always_lock_free,
              "a signal handler may touch lock-free atomics only");

void handle(int signal) {
  int none = 0;
  if (!g_requested.compare_exchange_strong(none, signal)) ::_exit(128 + signal);
}

void set_handler(void (*handler)(int)) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;  // no read or write of ours ends short because of the first signal
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  struct sigaction hangup{};  // nohup's way of saying that it is to be ignored
  if (::sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN)
    ::sigaction(SIGHUP, &action, nullptr);
}

}  // namespace

void hold_record_signal() {
  sigset_t record;
  ::sigemptyset(&record);
  ::sigaddset(&record, kRecordSignal);
  ::pthread_sigmask(SIG_BLOCK, &record, nullptr);
}

void install_signal_handlers() { set_handler(handle); }

void restore_signal_handlers() { set_handler(SIG_DFL); }

int requested_signal() noexcept { return g_requested.load(std::memory_order_relaxed); }

}  // namespace tessera::train
