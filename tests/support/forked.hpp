// Ranks as processes of a test: forked from it, so it has no thread of its own at that moment.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera::testing {

// What a process left: the text that its body returned, or "threw: ..." with what came out of it.
// Empty where it was killed.
struct Ended {
  std::string said;
  std::chrono::steady_clock::time_point at;
  int code = -1;  // with which it ended by itself
};

// `body` for each rank in a process of its own; `meanwhile` here, with their numbers. All have
// ended on return.
inline std::vector<Ended> run_forked(
    int ranks, const std::function<std::string(int rank)>& body,
    const std::function<void(std::span<const pid_t>)>& meanwhile = [](std::span<const pid_t>) {}) {
  std::vector<pid_t> pids;
  std::vector<int> pipes;
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    if (pipe(ends) != 0) throw DeviceError("no pipe");
    const pid_t pid = fork();
    if (pid < 0) throw DeviceError("no process");
    if (pid == 0) {
      std::string said;
      try {
        said = body(rank);
      } catch (const std::exception& error) {
        said = concat("threw: ", error.what());
      }
      _exit(write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size()) ? 0 : 1);
    }
    close(ends[1]);
    pids.push_back(pid);
    pipes.push_back(ends[0]);
  }
  meanwhile(pids);
  std::vector<Ended> all(pids.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    char part[4096];
    for (ssize_t n = 0; (n = read(pipes[i], part, sizeof part)) > 0;)
      all[i].said.append(part, static_cast<std::size_t>(n));
    all[i].at = std::chrono::steady_clock::now();
    close(pipes[i]);
    int status = 0;
    if (waitpid(pids[i], &status, 0) == pids[i] && WIFEXITED(status))
      all[i].code = WEXITSTATUS(status);
  }
  return all;
}

}  // namespace tessera::testing
