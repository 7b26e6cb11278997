#include "runtime/comm/processes/process_id.hpp"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

namespace tessera::comm {

ProcessId ProcessId::own() noexcept {
  struct stat status{};
  const bool is_known = stat("/proc/self/ns/pid", &status) == 0;
  return {.pid = getpid(), .pid_namespace = is_known ? status.st_ino : 0};
}

bool ProcessId::is_of_our_namespace() const noexcept {
  return pid_namespace != 0 && pid_namespace == own().pid_namespace;
}

int ProcessId::open() const noexcept {
  return is_of_our_namespace() ? static_cast<int>(syscall(SYS_pidfd_open, pid, 0)) : -1;
}

bool ProcessId::is_gone() const noexcept {
  return is_of_our_namespace() && kill(pid, 0) != 0 && errno == ESRCH;
}

}  // namespace tessera::comm
