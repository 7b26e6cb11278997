// Which threads of the process wait for others, and whether those get on: what a watchdog looks at
// to tell a thread that is slow from one that stands still. See run/watchdog.hpp.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace tessera {

// In its scope the calling thread waits for others. `what` and `why` outlive it; `progress`, called
// by another thread, changes as often as one of those gets on.
class Wait {
 public:
  // It may have a patience of its own, 0.5 s or more; else it is the watchdog's. `why` is what it
  // means when that is over.
  Wait(const char* what, std::function<std::uint64_t()> progress,
       std::chrono::duration<double> patience = {},
       const char* why = "and nothing moved: a thread hangs");
  ~Wait();
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

  // What waits for threads that have not got on for `patience`, or its own, with these;
  // null: none. To be asked again and again, twice a second or more often: of the time between two
  // looks at most a second counts, so that a process that was stopped goes on.
  struct Overdue {
    const char* what = nullptr;
    std::chrono::duration<double> patience{};
    const char* why = nullptr;
  };
  static Overdue overdue(std::chrono::duration<double> patience);

  // What the process ends with where a thread hangs: what the last watchdog says, or 1.
  static int exit_code();
  static void set_exit_code(std::function<int()> code);

 private:
  struct All {
    std::mutex mutex;
    std::vector<Wait*> waits;
    std::chrono::steady_clock::time_point looked{};
    std::function<int()> exit_code = [] { return 1; };
  };
  static All& all();

  const char *what_, *why_;
  std::function<std::uint64_t()> progress_;
  std::chrono::duration<double> patience_;
  std::uint64_t seen_ = 0;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::chrono::duration<double> age_{};  // of `seen_`
};

}  // namespace tessera
