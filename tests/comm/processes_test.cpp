// Ranks as processes that meet at a store, held against ranks as threads. Each case forks them.
#include <sched.h>
#include <sys/mount.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <thread>

#include "runtime/comm/processes/posix_memory.hpp"
#include "runtime/comm/processes/shared_bootstrap.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/comm/world.hpp"
#include "tests/comm/battery.hpp"
#include "tests/comm/mismatch.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/forked.hpp"
#include "tests/support/free_port.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::Ended;
using tessera::testing::free_port;
using tessera::testing::run_forked;

namespace {

// Of ranks that meet at a port that nobody else has.
class Seats {
 public:
  explicit Seats(int size) : size_(size), port_(free_port()) {}
  ProcessSeat operator()(int rank) const { return {.rank = rank, .size = size_, .port = port_}; }

 private:
  const int size_, port_;
};

// Of `ranks`, each of which runs `body` in its world.
std::vector<Ended> run_ranks_as_processes(
    int ranks, const std::function<std::string(World&)>& body, const WorldOptions& options = {},
    const std::function<void(std::span<const pid_t>)>& meanwhile = [](std::span<const pid_t>) {}) {
  const Seats seats(ranks);
  return run_forked(
      ranks,
      [&](int rank) {
        World world = World::processes(seats(rank), options);
        std::string said = body(world);
        world.end();
        return said;
      },
      meanwhile);
}

// What any world of processes has left in /dev/shm.
std::vector<std::string> segments() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    if (entry.path().filename().string().starts_with("tessera-"))
      names.push_back(entry.path().filename());
  return names;
}

}  // namespace

TEST_CASE("processes: every collective is right, with the bits of threads", "[comm]") {
  const std::uint64_t seed = tessera::testing::fresh_seed();
  INFO("seed " << seed);
  for (int ranks = 1; ranks <= 4; ++ranks) {
    INFO(ranks << " ranks");
    const std::vector<Ended> all = run_ranks_as_processes(ranks, [&](World& world) {
      const battery::Result result = battery::run(world, seed);
      return result.errors.empty() ? std::to_string(result.hash) : result.errors[0];
    });
    const std::vector<std::uint64_t> threads = battery::hashes_of_threads(ranks, seed);
    for (std::size_t r = 0; r < all.size(); ++r) CHECK(all[r].said == std::to_string(threads[r]));
  }
  CHECK(segments() == std::vector<std::string>{});
}

TEST_CASE("processes: groups of any ranks have the bits of threads, and memory comes and goes",
          "[comm]") {
  const std::uint64_t seed = tessera::testing::fresh_seed();
  INFO("seed " << seed);
  const std::vector<Ended> all = run_ranks_as_processes(4, [&](World& world) {
    const int other = (world.rank() + 2) % 4;
    const std::vector<int> pair{std::max(world.rank(), other), std::min(world.rank(), other)};
    const RankGroup& group = *world.split("pair", pair);
    const battery::Result result = battery::run(group, seed);
    const DeviceMesh mesh =
        DeviceMesh::grid(world, {{.name = "dp_replicate", .size = 2}, {.name = "tp", .size = 2}});
    for (int i = 0; i < 8; ++i) world.allocate_symmetric((i + 1) * 4096);
    if (world.kind() != WorldKind::processes || world.sum(1) != 4) return std::string("wrong");
    return result.errors.empty() ? std::to_string(result.hash) : result.errors[0];
  });
  const std::vector<std::uint64_t> threads = battery::hashes_of_threads(2, seed);
  for (std::size_t r = 0; r < all.size(); ++r)
    CHECK(all[r].said == std::to_string(threads[r < 2 ? 1 : 0]));
}

TEST_CASE("processes: a rank that goes astray or throws is named to all, who go on together",
          "[comm]") {
  const std::vector<Ended> all = run_ranks_as_processes(3, [&](World& world) {
    std::string heard;
    for (int odd = 0; odd < 3; ++odd) {
      try {
        world.control().submit({.kind = CollectiveKind::barrier},
                               world.rank() == odd ? "odd" : "even", {});
        world.device().synchronize();
      } catch (const CommError& error) {
        heard += error.what();
        world.recover();
      }
      try {
        world.sum(1);
        if (world.rank() == odd) throw std::runtime_error("no luck");
        world.sum(2);
      } catch (const std::exception&) {
        heard += world.recover();
      }
      if (world.sum(1) != 3) heard += "the sum is wrong";
    }
    return heard;
  });
  for (const Ended& ended : all) {
    CHECK_THAT(ended.said, Contains("'odd'") && Contains("'even'") && !Contains("wrong"));
    for (int odd = 0; odd < 3; ++odd)
      CHECK_THAT(ended.said, Contains(concat("rank ", odd, " failed: no luck")));
  }
}

TEST_CASE("processes: a rank that is killed in a step is named by all within a second", "[comm]") {
  for (int victim = 0; victim < 3; ++victim) {
    std::chrono::steady_clock::time_point killed;
    const std::vector<Ended> all = run_ranks_as_processes(
        3,
        [](World& world) {
          for (;;) world.sum(1);
          return std::string();
        },
        {},
        [&](std::span<const pid_t> pids) {
          std::this_thread::sleep_for(std::chrono::milliseconds(700));
          killed = std::chrono::steady_clock::now();
          kill(pids[static_cast<std::size_t>(victim)], SIGKILL);
        });
    for (int r = 0; r < 3; ++r) {
      const Ended& ended = all[static_cast<std::size_t>(r)];
      if (r == victim) {
        CHECK(ended.said.empty());
        continue;
      }
      CHECK_THAT(ended.said, Contains(concat("rank ", victim, " is gone")));
      const char* const patience = std::getenv("PATIENCE");
      CHECK(ended.at - killed < std::chrono::duration<double>(patience ? std::atof(patience) : 1));
    }
    CHECK(segments() == std::vector<std::string>{});
  }
}

TEST_CASE("processes: a rank that is killed while ranks come together leaves no memory", "[comm]") {
  const std::uint64_t seed = tessera::testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 draw(seed);
  for (int trial = 0; trial < 8; ++trial) {
    const auto victim = static_cast<std::size_t>(draw() % 3);
    const auto delay = std::chrono::microseconds(draw() % 60'000);
    const Seats seats(3);
    const std::vector<Ended> all = run_forked(
        3,
        [&](int rank) {
          World world = World::processes(seats(rank), {.init_timeout_seconds = 1});
          for (;;) world.allocate_symmetric(4096);
          return std::string();
        },
        [&](std::span<const pid_t> pids) {
          std::this_thread::sleep_for(delay);
          kill(pids[victim], SIGKILL);
        });
    INFO("rank " << victim << " killed after " << delay.count() << " us");
    for (std::size_t r = 0; r < 3; ++r)
      if (r != victim) CHECK_THAT(all[r].said, Contains("threw: "));
    CHECK(segments() == std::vector<std::string>{});
  }
}

TEST_CASE("processes: who never came is named with its rank, and the hosts of those that did") {
  const Seats seats(3);
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<Ended> all = run_forked(3, [&](int rank) -> std::string {
    if (rank == 1) return "stays away";
    World world = World::processes(seats(rank), {.init_timeout_seconds = 2});
    return "";
  });
  char host[256] = "";
  REQUIRE(gethostname(host, sizeof host - 1) == 0);
  for (const std::size_t rank : {0u, 2u}) {
    // Which of these it is depends on who looks at the time first: the store, or the rank.
    CHECK_THAT(all[rank].said,
               Contains(concat("rank ", rank, " has waited long enough")) ||
                   Contains(concat("rank ", rank, " has waited for its whole timeout")) ||
                   Contains("rank 0 listens on 127.0.0.1"));
    CHECK_THAT(all[rank].said,
               Contains("rank 1 of 3 never came; who came is on host " + std::string(host)) &&
                   !Contains("\n"));
    // Two seconds, and what a busy machine adds; a hang would be for ever.
    CHECK(all[rank].at - begin >= std::chrono::milliseconds(1900));
    CHECK(all[rank].at - begin < std::chrono::seconds(60));
  }
  CHECK(segments() == std::vector<std::string>{});
}

TEST_CASE("processes: who does not come to where memory is exchanged is listed") {
  constexpr int kRanks = 4;
  std::vector<std::unique_ptr<comm::PosixMemory>> boards;
  for (int r = 0; r < kRanks; ++r) {
    boards.push_back(std::make_unique<comm::PosixMemory>(concat("late-", getpid()), kRanks,
                                                         sizeof(comm::BoardPart)));
    boards.back()->make(r);
  }
  for (const int r : {0, 3})
    for (int other = 0; other < kRanks; ++other)
      REQUIRE(boards[static_cast<std::size_t>(r)]->map(other));
  for (auto& board : boards) board->forget_names();
  std::vector<std::string> said(kRanks);
  std::vector<std::thread> threads;
  for (const std::size_t r : {0u, 3u})
    threads.emplace_back([&, r] {
      const auto bootstrap = comm::SharedBootstrap::world(std::move(boards[r]), static_cast<int>(r),
                                                          7, std::chrono::milliseconds(300));
      try {
        bootstrap->meet();
      } catch (const CommError& error) {
        said[r] = error.what();
      }
      bootstrap->free();
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::size_t r : {0u, 3u})
    CHECK_THAT(said[r],
               Contains("for 0.3 s (init_timeout_seconds) these ranks have not come: 1-2"));
}

TEST_CASE("processes: who is killed where memory is exchanged is named at once", "[comm]") {
  constexpr int kRanks = 3, kKilled = 1;
  const std::string name = concat("killed-", getpid());
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<Ended> all = run_forked(kRanks, [&](int rank) {
    auto board = std::make_unique<comm::PosixMemory>(name, kRanks, sizeof(comm::BoardPart));
    const auto part = [&](int r) { return comm::views<comm::BoardPart>(*board).at(r); };
    board->make(rank);
    part(rank)->process = comm::ProcessId::own();
    part(rank)->token = 7;
    for (int r = 0; r < kRanks; ++r)
      while (!board->map(r) || part(r)->token != 7) std::this_thread::yield();
    const auto bootstrap =
        comm::SharedBootstrap::world(std::move(board), rank, 7, std::chrono::minutes(10));
    bootstrap->meet();
    if (rank == kKilled) kill(getpid(), SIGKILL);
    bootstrap->meet();
    return std::string();
  });
  for (const std::size_t r : {0u, 2u})
    CHECK_THAT(all[r].said, Contains("rank 1 is gone: its process ") &&
                                Contains(" has ended without a word, while ranks came together"));
  // A second is promised; else it would be ten minutes.
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));
}

TEST_CASE("processes: ranks that share no memory hear how to start such a job", "[comm]") {
  const Seats seats(3);
  const std::vector<Ended> all = run_forked(3, [&](int rank) -> std::string {
    // The last rank is on a machine of its own, as far as its memory goes.
    if (rank == 2 && (unshare(CLONE_NEWNS) != 0 ||
                      mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
                      mount("tmpfs", "/dev/shm", "tmpfs", 0, nullptr) != 0))
      return "skipped";
    World world = World::processes(seats(rank));
    return "";
  });
  if (all[2].said == "skipped") {
    std::puts("skipped: a rank may not have a /dev/shm of its own here (CAP_SYS_ADMIN)");
    return;
  }
  for (const Ended& ended : all)
    CHECK_THAT(ended.said, Contains("ranks 0 1 | 2") && Contains("several machines") &&
                               Contains("mpirun -n 3") && !Contains("\n"));
}

TEST_CASE("processes: memory that /dev/shm has no room for is an error on every rank", "[comm]") {
  const Seats seats(2);
  const std::vector<Ended> outer = run_forked(1, [&](int) -> std::string {
    if (unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=8m") != 0)
      return "skipped";
    std::string said;
    for (const Ended& ended : run_forked(2, [&](int rank) {
           World world = World::processes(seats(rank));
           world.allocate_symmetric(16 << 20);
           return std::string();
         }))
      said += ended.said + '\n';
    for (const std::string& name : segments()) said += name + " is left";
    return said;
  });
  const std::string& said = outer[0].said;
  if (said == "skipped") {
    std::puts("skipped: ranks may not have a /dev/shm of their own here (CAP_SYS_ADMIN)");
    return;
  }
  CHECK_THAT(said, Contains("rank 0: World::processes: 16777216 bytes") &&
                       Contains("make /dev/shm larger") && !Contains("is left"));
  CHECK(std::ranges::count(said, '\n') == 2);
}

TEST_CASE("processes: a seat and options that can't be are refused", "[comm]") {
  CHECK_THROWS_WITH(World::processes({.rank = 2, .size = 2}), Contains("rank 2 of 2"));
  // Nothing is made for each of them before.
  CHECK_THROWS_WITH(World::processes({.size = 2'000'000'000, .port = free_port()}),
                    Contains("rank 0 needs 2000000512 file descriptors"));
  CHECK_THROWS_WITH(World::processes({.size = 2, .host = "fe80::7", .port = free_port()}),
                    Contains("fe80::7 is an address on a link") && Contains("fe80::7%eth0"));
  CHECK_THROWS_WITH(World::processes({}, {.executor = ExecutorKind::virtual_}),
                    Contains("World::processes: the virtual executor"));
  CHECK_THROWS_WITH(World::processes({}, {.transport = Transport::messages}),
                    Contains("send no messages"));
  CHECK_THROWS_WITH(World::processes({}, {.init_timeout_seconds = 0}),
                    Contains("init_timeout_seconds is 0"));
  CHECK_THROWS_WITH(World::processes({}, {.device = {.kind = DeviceKind::cuda}}),
                    Contains("World::processes: "));
}
