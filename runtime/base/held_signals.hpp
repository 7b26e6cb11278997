// In its scope no signal comes to this thread, nor to threads that it starts there, as long as they
// live: for what must not be cut in half. A signal that came is delivered at the end.
#pragma once

#include <csignal>

namespace tessera {

class HeldSignals {
 public:
  HeldSignals() noexcept {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~HeldSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace tessera
