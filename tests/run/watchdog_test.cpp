// What a watchdog ends, in processes of their own.
#include "tessera/run/watchdog.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>

#include "runtime/base/wait.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using Catch::Matchers::Contains;

namespace {

// What `body` logs in a process of its own, and how that ended.
struct Ended {
  std::string said;
  int status = 0;
};
template <class F>
Ended in_a_process(const F& body) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    alarm(100);  // no hang where nothing ends it
    set_log_sink([&](LogLevel, const std::string& line) {
      if (write(ends[1], line.data(), line.size()) < 0) _exit(99);
    });
    body();
    _exit(0);
  }
  close(ends[1]);
  Ended ended;
  char part[4096];
  for (ssize_t n = 0; (n = read(ends[0], part, sizeof part)) > 0;)
    ended.said.append(part, static_cast<std::size_t>(n));
  close(ends[0]);
  waitpid(pid, &ended.status, 0);
  return ended;
}

[[noreturn]] void hang() {
  for (;;) pause();
}

}  // namespace

TEST_CASE("a wait that has a patience of its own is ended by it, and named") {
  const auto begin = std::chrono::steady_clock::now();
  const Ended ended = in_a_process([] {
    const Watchdog watchdog(1e6, [] { return 7; });
    const Wait wait("a test waits", [] { return 0; }, std::chrono::milliseconds(500));
    hang();
  });
  CHECK(WIFEXITED(ended.status));
  CHECK(WEXITSTATUS(ended.status) == 7);
  CHECK(ended.said == "a test waits for 0.5 s, and nothing moved: a thread hangs");
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(500));
}

TEST_CASE("a process that is to end with its parent hears SIGTERM when that has gone") {
  const Ended ended = in_a_process([] {
    int ready[2];
    if (pipe(ready) != 0 || fork() != 0) {
      char byte = 0;
      close(ready[1]);
      _exit(read(ready[0], &byte, 1) == 1 ? 0 : 1);  // the parent goes
    }
    alarm(100);
    std::signal(SIGTERM, SIG_DFL);  // Catch has one
    Watchdog watchdog(1e6, [] { return 7; });
    watchdog.end_with_parent();
    static_cast<void>(write(ready[1], "r", 1) < 0);
    hang();  // what reads the log sees its end
  });
  CHECK(ended.status == 0);
  CHECK_THAT(ended.said, Contains("is gone; this rank ends as by SIGTERM"));
}
