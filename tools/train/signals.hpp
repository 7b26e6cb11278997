// SIGINT and SIGTERM: the first asks for an orderly end after the current step, the second ends the
// process at once. Mutable state of the process, as signals are; only main and the training loop
// use it.
#pragma once

namespace tessera::train {

// From here on the first SIGINT or SIGTERM is only remembered, a further one ends the process with
// 128 + its number.
void install_signal_handlers();

// From here on either ends the process, as before.
void restore_signal_handlers();

// The number of the signal that has come, 0 while none has. Free of cost: read it every step.
int requested_signal() noexcept;

}  // namespace tessera::train
