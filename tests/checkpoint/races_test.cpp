// Saves that are killed at any instant or beside others: in a folder that they make, at once with
// another program's, and while that sweeps.
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <thread>

#include "runtime/checkpoint/new_folder.hpp"
#include "runtime/checkpoint/shard_info.hpp"
#include "tests/checkpoint/saved_steps.hpp"
#include "tests/checkpoint/system_calls.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/share.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using namespace tessera::testing;
namespace fs = std::filesystem;

namespace {

// What each rank hears of a save; nothing where it is done.
std::vector<std::string> heard_of_save(const std::string& folder, std::int64_t step,
                                       int ranks = kSavers) {
  std::vector<std::string> heard(static_cast<std::size_t>(ranks));
  run_local(ranks, {.threads = 1}, [&](World& world) {
    CallWatch::set_rank(world.rank());
    try {
      save_step(folder, step, world);
    } catch (const std::exception& error) {
      heard[static_cast<std::size_t>(world.rank())] = error.what();
    }
  });
  return heard;
}

void save_well(const std::string& folder, std::int64_t step) {
  const CallWatch watch(folder);
  for (const std::string& said : heard_of_save(folder, step)) CHECK(said == "");
}

}  // namespace

TEST_CASE("a save that is killed in a folder that it makes leaves no checkpoint or the new one") {
  const TemporaryFolder root;
  const std::string runs = root / "runs", folder = root / "runs/a/b";
  GridShare share;
  int killed = 0, saved = 0;
  for (int rank = 0; rank < kSavers; ++rank) {
    for (std::size_t at = 1;; ++at) {
      if (!share.takes()) continue;
      fs::create_directory(runs);
      const pid_t child = ::fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        const CallWatch watch(runs, {.rank = rank, .at = at, .signal = SIGKILL});
        ::raise(heard_of_save(folder, 2)[0].empty() ? SIGUSR1 : SIGUSR2);
      }
      int status = 0;
      REQUIRE(::waitpid(child, &status, 0) == child);
      INFO("rank " << rank << ", call " << at << ", status " << status);
      REQUIRE(WIFSIGNALED(status));
      const bool is_whole = WTERMSIG(status) == SIGUSR1;
      if (!is_whole) CHECK(WTERMSIG(status) == SIGKILL);
      killed += is_whole ? 0 : 1;
      CHECK(complaint(folder) == "");
      const std::size_t there = checkpoint::steps_in(folder).size();
      CHECK((there == 1 || !is_whole));
      saved += static_cast<int>(there);
      save_well(folder, 3);
      CHECK(complaint(folder, 3) == "");
      CHECK(checkpoint::steps_in(folder).size() == there + 1);
      CHECK(hidden_in(folder).empty());
      fs::remove_all(runs);
      if (is_whole) break;
    }
  }
  CHECK(killed > (GridShare::stride() > 2 ? 5 : 30));
  CHECK(saved > 0);
}

TEST_CASE("a program that is killed at any instant has what its saves have returned") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  Dice dice(seed);
  const TemporaryFolder root;
  const std::string folder = root / "runs";
  const int instants = 200 / static_cast<int>(GridShare::stride());
  std::int64_t next = 1, saved_in_all = 0;
  for (int instant = 0; instant < instants; ++instant) {
    int told[2];
    REQUIRE(::pipe(told) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      const CallWatch watch(folder);
      for (std::int64_t step = next;; ++step) {
        const bool is_saved = heard_of_save(folder, step)[0].empty();
        if (!is_saved || ::write(told[1], &step, sizeof step) != sizeof step) ::raise(SIGUSR2);
        checkpoint::keep_newest(folder, 2);
      }
    }
    ::close(told[1]);
    // At once, or behind a save, however busy the machine is.
    pollfd saved{.fd = told[0], .events = POLLIN, .revents = 0};
    if (dice.once_in(2)) ::poll(&saved, 1, -1);
    ::usleep(static_cast<unsigned>(dice.below(12000)));
    REQUIRE(::kill(child, SIGKILL) == 0);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
    std::int64_t last = next - 1;
    for (std::int64_t step = 0; ::read(told[0], &step, sizeof step) == sizeof step; last = step)
      ++saved_in_all;
    ::close(told[0]);
    INFO("instant " << instant << ", step " << last << " was told");
    const auto steps =
        fs::exists(folder) ? checkpoint::steps_in(folder) : std::vector<std::int64_t>{};
    const std::int64_t newest = steps.empty() ? 0 : steps.back();
    CHECK((newest == last || newest == last + 1));
    CHECK((steps.size() >= 2 || newest < 2));
    CHECK(complaint(folder) == "");
    next = newest + 1;
  }
  CHECK(saved_in_all >= instants / 4);
}

TEST_CASE("of two programs that save one step at once one wins, and the other hears so in a line") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  Dice dice(seed);
  const TemporaryFolder root;
  const std::string folder = root.path().string();
  save_well(folder, 1);
  const int races = 100 / static_cast<int>(GridShare::stride());
  int first_wins = 0;
  for (int race = 0; race < races; ++race) {
    // Of one step, or of two, of which both are saved.
    const bool is_same = race % 4 != 3;
    const int ranks[2] = {1 + dice.below(3), 1 + dice.below(3)};
    int begin[2];
    REQUIRE(::pipe(begin) == 0);
    pid_t children[2];
    for (int own = 0; own < 2; ++own) {
      const int pause = dice.once_in(2) ? 0 : dice.below(1500);
      children[own] = ::fork();
      REQUIRE(children[own] >= 0);
      if (children[own] != 0) continue;
      ::close(begin[1]);
      pollfd wait{.fd = begin[0], .events = POLLIN, .revents = 0};
      ::poll(&wait, 1, -1);  // until the other end is closed
      ::usleep(static_cast<unsigned>(pause));
      const CallWatch watch(folder);
      const auto said = heard_of_save(folder, is_same || own == 0 ? 2 : 3, ranks[own]);
      int code = said[0].empty() ? 0 : 1;
      if (code == 1 && said[0].find("step-2' exists already and is kept") == std::string::npos)
        code = 2;
      for (const std::string& each : said)
        if (each != said[0]) code = 3;
      if (code > 1 && ::write(STDERR_FILENO, said[0].data(), said[0].size()) < 0) code = 4;
      ::_exit(code);
    }
    ::close(begin[0]);
    ::close(begin[1]);
    int codes[2];
    for (int own = 0; own < 2; ++own) {
      int status = 0;
      REQUIRE(::waitpid(children[own], &status, 0) == children[own]);
      REQUIRE(WIFEXITED(status));
      codes[own] = WEXITSTATUS(status);
    }
    INFO("race " << race << ", of one step " << is_same << ", codes " << codes[0] << ", "
                 << codes[1]);
    if (is_same) {
      CHECK(codes[0] + codes[1] == 1);
      CHECK((codes[0] == 0 || codes[1] == 0));
      first_wins += codes[0] == 0 ? 1 : 0;
      CHECK(checkpoint::Checkpoint(folder, 2).ranks() == ranks[codes[0] == 0 ? 0 : 1]);
      CHECK(checkpoint::steps_in(folder) == std::vector<std::int64_t>{1, 2});
    } else {
      CHECK(codes[0] + codes[1] == 0);
      CHECK(checkpoint::steps_in(folder) == std::vector<std::int64_t>{1, 2, 3});
    }
    CHECK(complaint(folder) == "");
    CHECK(hidden_in(folder).empty());
    for (const char* const step : {"step-2", "step-3"}) fs::remove_all(fs::path(folder) / step);
  }
  if (GridShare::stride() == 1) {
    CHECK(first_wins > 0);
    CHECK(first_wins < races);
  }
}

TEST_CASE("a folder that is swept before it is locked is made anew") {
  const TemporaryFolder root;
  const std::string folder = root.path().string();
  std::atomic<bool> is_over{false};
  std::thread sweeper([&] {
    while (!is_over) checkpoint::NewFolder::sweep(folder);
  });
  const int folders = 4000 / static_cast<int>(GridShare::stride());
  std::string said;
  for (int i = 0; i < folders && said.empty(); ++i) try {
      const std::string name = concat("step-", i);
      const checkpoint::NewFolder made(folder, name, "0");
      fs::create_directory(checkpoint::NewFolder::hidden(folder, name, "0") + "/model");
    } catch (const Error& error) {
      said = error.what();
    }
  is_over = true;
  sweeper.join();
  CHECK(said == "");
  CHECK(hidden_in(folder).empty());
}

TEST_CASE("a file system without locks takes checkpoints, and keeps what others have left") {
  const TemporaryFolder root;
  const std::string folder = root.path().string();
  std::int64_t step = 0;
  // Which of rank 0's calls is the first that takes a lock.
  const auto first_lock = [&] {
    const CallWatch watch(folder);
    heard_of_save(folder, ++step);
    const auto calls = watch.calls_of(0);
    const auto found = std::ranges::find(calls, CallKind::lock, &SystemCall::kind);
    REQUIRE(found != calls.end());
    return static_cast<std::size_t>(found - calls.begin()) + 1;
  };
  const std::size_t own = first_lock();
  for (const int error : {ENOSYS, EOPNOTSUPP}) {
    const CallWatch watch(folder, {.rank = 0, .at = own, .error = error});
    for (const std::string& said : heard_of_save(folder, ++step)) CHECK(said == "");
    CHECK(complaint(folder, step) == "");
  }
  // Of the sweep.
  const auto leave = [&] { fs::create_directory(root / ".unfinished-step-9-0"); };
  leave();
  const std::size_t of_sweep = first_lock();
  CHECK(hidden_in(folder).empty());
  leave();
  const CallWatch watch(folder, {.rank = 0, .at = of_sweep, .error = ENOSYS});
  for (const std::string& said : heard_of_save(folder, ++step)) CHECK(said == "");
  CHECK(hidden_in(folder).size() == 1);
}

// The lock of its owner, on another host, is not seen here.
TEST_CASE("a save leaves another host's unfinished folder alone for a day") {
  const TemporaryFolder root;
  const std::string folder = root / "run";
  fs::create_directory(folder);
  const std::string random(16, '0');
  const auto left = [&](std::uint64_t host) {
    return concat(folder, "/.unfinished-step-9-", checkpoint::hex(host), random);
  };
  const std::string own = left(checkpoint::NewFolder::own_host()),
                    others = left(checkpoint::NewFolder::own_host() + 1);
  fs::create_directory(own);
  fs::create_directory(others);
  for (const std::string& said : heard_of_save(folder, 1)) CHECK(said == "");
  CHECK_FALSE(fs::exists(own));
  CHECK(fs::exists(others));
  fs::last_write_time(others, fs::file_time_type::clock::now() - std::chrono::hours(25));
  for (const std::string& said : heard_of_save(folder, 2)) CHECK(said == "");
  CHECK_FALSE(fs::exists(others));
}
