// Seeds tried by several processes, each on a core of its own: what runs in one hands over from
// thread to thread, which is faster there. A process that ends in the midst of a seed has failed
// with it, and one that hangs ends.
#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera::testing {

constexpr int kMostProcesses = 64;

// What the processes share. `seen` is the caller's.
struct SeedBoard {
  std::atomic<std::uint64_t> next, failures, seen;
  std::atomic<std::uint64_t> at[kMostProcesses];  // 1 + the seed of each, 0 for none
};

inline void stay_on_core(int process) {
  cpu_set_t mine, mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return;
  int skip = process % CPU_COUNT(&mask);
  CPU_ZERO(&mine);
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &mask) && skip-- == 0) CPU_SET(core, &mine);
  sched_setaffinity(0, sizeof(mine), &mine);
}

// Tries seeds 0 to count - 1. fault_of(i) says what is wrong with seed i, empty for nothing;
// report(i, what) tells the user; at_end(board) runs in each process when it has no seed left. A
// process stops after `most_failures`. Null in these processes, which then have nothing left to do.
// Throws: ContractError where the system has no memory or
// process.
template <class FaultOf, class Report, class AtEnd>
const SeedBoard* try_seeds(std::uint64_t count, int processes, int most_failures,
                           const FaultOf& fault_of, const Report& report, const AtEnd& at_end) {
  constexpr unsigned kSecondsPerSeed = 120;  // far more than the slowest sanitizer takes
  void* const shared =
      mmap(nullptr, sizeof(SeedBoard), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  TESSERA_EXPECT(shared != MAP_FAILED, "the system has no memory");
  SeedBoard& board = *new (shared) SeedBoard{};
  std::vector<pid_t> children;
  for (int process = 0; process < processes; ++process) {
    const pid_t child = fork();
    TESSERA_EXPECT(child >= 0, "the system has no process");
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    stay_on_core(process);
    for (int failures = 0; failures < most_failures;) {
      const std::uint64_t i = board.next.fetch_add(1);
      if (i >= count) break;
      board.at[process] = i + 1;
      alarm(kSecondsPerSeed);
      const std::string what = fault_of(i);
      if (what.empty()) continue;
      ++failures;
      ++board.failures;
      report(i, what);
    }
    board.at[process] = 0;
    at_end(board);
    return nullptr;
  }
  for (std::size_t process = 0; process < children.size(); ++process) {
    int status = 0;
    waitpid(children[process], &status, 0);
    const std::uint64_t at = board.at[process];
    if (at == 0 && status == 0) continue;
    ++board.failures;
    const std::string what = WIFSIGNALED(status) ? concat("ended by signal ", WTERMSIG(status))
                                                 : concat("exit code ", WEXITSTATUS(status));
    if (at > 0)
      report(at - 1, what);
    else
      std::cout << "FAILED at the end of a process: " << what << '\n';
  }
  return &board;
}

}  // namespace tessera::testing
