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
#include <chrono>
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

// What the command line of a program that tries seeds asks for.
struct SeedRequest {
  std::uint64_t first = 0, count = 0;
  int jobs = 2;
  bool is_one = false;
};

// Throws: ContractError for words that it does not know.
inline SeedRequest parse_seeds(const std::vector<std::string>& words) {
  SeedRequest request;
  for (std::size_t i = 1; i < words.size(); i += 2) {
    std::size_t end = 0;
    std::uint64_t value = 0;
    try {
      value = std::stoull(words.at(i + 1), &end);
    } catch (const std::logic_error&) {
      end = 0;
    }
    TESSERA_EXPECT(end > 0 && end == words[i + 1].size(), words[i], " needs a number");
    if (words[i] == "--first")
      request.first = value;
    else if (words[i] == "--count")
      request.count = value;
    else if (words[i] == "--jobs")
      request.jobs = static_cast<int>(std::clamp<std::uint64_t>(value, 1, kMostProcesses));
    else if (words[i] == "--seed")
      request = {.first = value, .count = 1, .jobs = 1, .is_one = true};
    else
      TESSERA_EXPECT(false, "there is no option ", words[i]);
  }
  TESSERA_EXPECT(request.count > 0, "how many seeds?");
  return request;
}

// The main of such a program: print(seed) shows what a seed is where one alone is asked for,
// complaint(seed) is empty where all is well. Returns the exit code.
template <class Print, class Complaint>
int try_asked(const std::string& name, const std::vector<std::string>& words, const Print& print,
              const Complaint& complaint) {
  constexpr int kMostFailures = 10;  // of a process, after which it stops
  try {
    const SeedRequest request = parse_seeds(words);
    if (request.is_one) print(request.first);
    std::cout << std::flush;  // or each process prints it again
    const auto start = std::chrono::steady_clock::now();
    const SeedBoard* const board = try_seeds(
        request.count, request.jobs, kMostFailures,
        [&](std::uint64_t i) { return complaint(request.first + i); },
        [&](std::uint64_t i, const std::string& what) {
          std::cout << concat("FAILED seed ", request.first + i, ": ", what,
                              "\n  again: ", words[0], " --seed ", request.first + i, '\n')
                    << std::flush;
        },
        [](SeedBoard&) {});
    if (!board) return 0;
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    const std::uint64_t tried = std::min<std::uint64_t>(board->next, request.count);
    std::cout << name << ": seeds=" << tried << " failures=" << board->failures
              << " first=" << request.first << " seconds=" << taken.count() << '\n';
    return board->failures == 0 && tried == request.count ? 0 : 1;
  } catch (const ContractError& error) {
    std::cerr << name << ": " << error.what() << "\nusage: " << words[0]
              << " [--first N] --count N [--jobs N]\n       " << words[0] << " --seed N\n";
    return 2;
  }
}

}  // namespace tessera::testing
