// Who a rank's process is to others of its machine: enough to hear of its end.
#pragma once

#include <cstdint>

namespace tessera::comm {

struct ProcessId {
  int pid = 0;
  std::uint64_t pid_namespace = 0;  // 0: unknown

  static ProcessId own() noexcept;
  // A descriptor that is readable once the process has ended (pidfd_open). -1: it is gone already,
  // or in another namespace than this process, where its number means another one.
  int open() const noexcept;
  bool is_gone() const noexcept;  // false, too, where that can't be seen

 private:
  bool is_of_our_namespace() const noexcept;
};

}  // namespace tessera::comm
