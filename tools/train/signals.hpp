// SIGINT and SIGTERM: the first asks for an orderly end after the current step, the second ends the
// process at once. SIGUSR2 asks for the flight record. Mutable state of the process, as signals
// are; only main, the training loop and FlightRecordFiles use it.
#pragma once

#include <csignal>

namespace tessera::train {

inline constexpr int kRecordSignal = SIGUSR2;

// From here on kRecordSignal waits for who asks for it, in this thread and those it starts.
void hold_record_signal();

// From here on the first SIGINT, SIGTERM or SIGHUP (unless ignored) is only remembered, a further
// one ends the process with 128 + its number. Threads: several may ask for it.
void install_signal_handlers();

// From here on each ends the process, as before.
void restore_signal_handlers();

// The number of the signal that has come, 0 while none has. Free of cost: read it every step.
int requested_signal() noexcept;

}  // namespace tessera::train
