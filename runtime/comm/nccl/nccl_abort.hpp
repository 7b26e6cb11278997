// The abort of native communicators, which NCCL may never come back from.
#pragma once

#include <functional>
#include <string>

namespace tessera::comm {

// Calls `abort` on a thread of its own. Where that is not back in kAbortWithin, ends the process
// with a line that says `why`, and with what a watchdog ends it with: NCCL waits for kernels then,
// on this GPU or a peer's, that nothing ends, and so would whoever blocks on this GPU, for ever.
void abort_in_time(const std::string& why, const std::function<void()>& abort) noexcept;

}  // namespace tessera::comm
