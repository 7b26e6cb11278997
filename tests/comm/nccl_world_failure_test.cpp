// What ranks of World::nccl hear of one that throws, dies, comes late or is refused, and how they
// go on. NCCL is a double, whose aborts wait for peers.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <stdexcept>
#include <thread>

#include "tessera/base/log.hpp"
#include "tessera/comm/lost_rank.hpp"
#include "tests/comm/nccl_worlds.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using namespace tessera::testing;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;

namespace {

// Native communicators that are left.
long long communicators() { return double_count("communicators"); }

void sum_for_ever(World& world) {
  for (;;) world.sum(1);
}

}  // namespace

TEST_CASE("nccl: a rank that throws is named to all, who go on together", "[comm]") {
  const auto body = [](World& world) {
    std::string heard;
    for (int odd = 0; odd < world.size(); ++odd) {
      try {
        world.sum(1);
        if (world.rank() == odd) throw std::runtime_error("no luck");
        world.sum(2);
      } catch (const std::exception&) {
        heard += world.recover() + "; ";
      }
      if (world.sum(1) != world.size() || world.max(world.rank()) != world.size() - 1)
        heard += "the sum is wrong";
    }
    return heard;
  };
  for (const auto& all : {nccl_threads(3, body), nccl_processes(2, body)})
    for (const std::string& said : all) {
      CHECK_THAT(said, !Contains("wrong") && !Contains("threw"));
      for (std::size_t odd = 0; odd < all.size(); ++odd)
        CHECK_THAT(said, Contains(concat("rank ", odd, " failed: no luck")));
    }
  CHECK(communicators() == 0);
}

TEST_CASE("nccl: a failure while a communicator is split off leaves none of it", "[comm]") {
  for (const std::string& said : nccl_threads(2, [](World& world) {
         std::string heard;
         try {
           if (world.rank() == 1) {
             std::this_thread::sleep_for(300ms);
             throw std::runtime_error("no luck");
           }
           world.sum(1);  // the first call, which splits
         } catch (const std::exception&) {
           heard = world.recover();
         }
         return heard + (world.sum(1) == 2 ? "" : "; the sum is wrong");
       }))
    CHECK_THAT(said, Contains("no luck") && !Contains("wrong"));
  CHECK(communicators() == 0);
}

TEST_CASE("nccl: groups are made anew after a failure", "[comm]") {
  WorldOptions options;
  options.nccl.windows = true;  // memory outlives the communicators
  const NcclBody body = [](World& world) {
    const std::vector<int> pair{world.rank() / 2 * 2, world.rank() / 2 * 2 + 1};
    const RankGroup& group = *world.split("pair", pair);
    const auto memory = group.allocate_symmetric(4096);
    const double before = group.sum(world.rank());
    try {
      if (world.rank() == 3) throw std::runtime_error("no luck");
      for (;;) group.sum(1);
    } catch (const std::exception&) {
      world.recover();
    }
    const double after = group.sum(world.rank());
    return concat(before == after && world.sum(1) == 4, ' ', before);
  };
  const std::vector<std::string> all = nccl_threads(4, body, options);
  CHECK(all == std::vector<std::string>{"1 1", "1 1", "1 5", "1 5"});
  CHECK(communicators() == 0);
}

TEST_CASE("nccl: a process that is killed is named by all who are left", "[comm]") {
  for (std::size_t victim = 0; victim < 2; ++victim) {
    const std::vector<std::string> all = nccl_processes(
        2,
        [](World& world) {
          try {
            sum_for_ever(world);
          } catch (const LostRank& error) {  // so that a program says it at once
            throw std::runtime_error(concat("lost: ", error.what()));
          }
          return std::string();
        },
        {}, {},
        [&](std::span<const pid_t> pids) {
          std::this_thread::sleep_for(3s);
          kill(pids[victim], SIGKILL);
        });
    INFO("rank " << victim << " is killed, the other says: " << all[1 - victim]);
    CHECK(all[victim].empty());
    CHECK_THAT(all[1 - victim], Contains("threw: lost: ") && Contains(concat("rank ", victim)));
    CHECK(all[1 - victim].find("ncclRemoteError") == std::string::npos);
  }
}

TEST_CASE("nccl: where NCCL's abort does not come back, the process ends and says why", "[comm]") {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const int port = free_port();
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<Ended> all = run_forked(2, [&](int rank) {
    if (rank == 0) {
      double_call<bool(const char*, long long)>("tessera_nccl_double_set")("stuck_aborts", 1);
      set_log_sink([&](LogLevel, const std::string& line) {
        static_cast<void>(!write(ends[1], line.data(), line.size()));
      });
    }
    const Gpus gpus(2);
    return say({.rank = rank, .size = 2, .port = port}, {}, [](World& world) {
      world.sum(1);
      if (world.rank() == 1) throw std::runtime_error("no luck");
      sum_for_ever(world);
      return std::string();
    });
  });
  close(ends[1]);
  std::array<char, 4096> line{};
  static_cast<void>(!read(ends[0], line.data(), line.size() - 1));
  close(ends[0]);
  CHECK(all[0].said.empty());
  CHECK(all[0].code == 1);
  CHECK(all[0].at - begin > 2s);
  CHECK(all[0].at - begin < 10s);
  CHECK_THAT(line.data(), Contains("the process ends: NCCL's abort has not come back in 2 s") &&
                              Contains("rank 1 failed: no luck"));
}

TEST_CASE("nccl: a world whose communicators NCCL does not free ends with an error", "[comm]") {
  const auto set = double_call<bool(const char*, long long)>("tessera_nccl_double_set");
  const std::vector<std::string> all = nccl_threads(
      2,
      [&](World& world) {
        world.sum(1);
        set("stuck_ends", 1);
        return std::string("ends");
      },
      {}, [](int, WorldOptions& options) { options.init_timeout_seconds = 1; });
  set("stuck_ends", 0);
  for (const std::string& said : all)
    CHECK_THAT(said, Contains("threw: ") && Contains("NCCL has not freed its communicators in 1"));
  CHECK(communicators() == 0);
}

// For as long as NCCL frees its communicators, and not for init_timeout_seconds, 30 here.
TEST_CASE("nccl: a process that is killed at the end of the world is named", "[comm]") {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<std::string> all = nccl_processes(2, [](World& world) {
    world.sum(1);
    double_call<bool(const char*, long long)>("tessera_nccl_double_set")("stuck_ends", 1);
    if (world.rank() == 1)
      std::thread([] {
        std::this_thread::sleep_for(500ms);
        raise(SIGKILL);
      }).detach();
    return std::string("ends");
  });
  CHECK_THAT(all[0], Contains("threw: ") && Contains("rank 1") && !Contains("has not freed"));
  CHECK(all[1].empty());
  CHECK(std::chrono::steady_clock::now() - begin < 15s);
}

TEST_CASE("nccl: a call that a rank does not come to says who is where", "[comm]") {
  const std::vector<std::string> all =
      nccl_threads(2,
                   [](World& world) {
                     world.sum(1);
                     std::string heard;
                     try {
                       if (world.rank() == 1) std::this_thread::sleep_for(3s);
                       world.max(2);
                     } catch (const CommError& error) {
                       heard = error.what();
                     }
                     world.recover();
                     return heard + (world.sum(1) == 2 ? "" : "; the sum is wrong");
                   },
                   {.timeout_seconds = 1});
  for (const std::string& said : all)
    CHECK_THAT(said, Contains("call 2, 'max' on 'control'") && Contains("has taken 1 s") &&
                         Contains("rank 0 has submitted 2 calls") &&
                         Contains("rank 1 has submitted 1 call") && !Contains("wrong"));
}

// Timeouts are 100 s: what is told here is told by comparing.
TEST_CASE("nccl: ranks that submit different calls are told apart as threads are, and go on",
          "[comm]") {
  for (int odd = 0; odd < 3; ++odd) {
    const std::vector<std::string> all = nccl_threads(3, [odd](World& world) {
      world.sum(1);
      std::string heard;
      double even = 1;
      try {
        if (world.rank() == odd)
          world.barrier();
        else
          world.max(std::span(&even, 1), "even");
        sum_for_ever(world);
      } catch (const CommError& error) {
        heard = error.what();
      }
      world.recover();
      return heard + (world.sum(1) == 3 ? "" : "; the sum is wrong");
    });
    for (const std::string& said : all)
      CHECK_THAT(said, Contains("call 2: rank 0 submitted ") && Contains("'even'") &&
                           Contains("'barrier'") && Contains("the same collectives") &&
                           !Contains("wrong"));
  }
}

TEST_CASE("nccl: an error that NCCL tells later is every rank's", "[comm]") {
  constexpr int kRemoteError = 6;
  const auto break_rank = double_call<void(int, long long, int)>("tessera_nccl_double_break");
  break_rank(1, 4, kRemoteError);
  const std::vector<std::string> all = nccl_threads(2, [](World& world) {
    sum_for_ever(world);
    return std::string();
  });
  break_rank(1, -1, 0);
  for (const std::string& said : all)
    CHECK_THAT(said, Contains("threw: ") && Contains("rank 1: NCCL: "));
  CHECK(communicators() == 0);
}

TEST_CASE("nccl: ranks on one GPU are named to all, and ranks on none are refused", "[comm]") {
  const auto nothing = [](World&) { return std::string("came"); };
  const auto one_gpu = [](int, WorldOptions& options) { options.device.index = 0; };
  for (const std::string& said : nccl_threads(2, nothing, {}, one_gpu))
    CHECK_THAT(said, Contains("ranks 0 and 1 are both on GPU-emulated-0"));
  CHECK_THAT(
      nccl_threads(1, nothing, {}, [](int, WorldOptions& options) { options.device = {}; })[0],
      Contains("ranks are on GPUs"));
}

TEST_CASE("nccl: ranks that ask for other sizes, or make other numbers of steps, hear of it",
          "[comm]") {
  for (const std::string& said : nccl_threads(2, [](World& world) {
         world.allocate_symmetric(4096 * (world.rank() + 1), "a test");
         return std::string();
       }))
    CHECK_THAT(said, Contains("4096 for a test") && Contains("8192 for a test"));
  for (const std::string& said : nccl_threads(2, [](World& world) {
         world.sum(1);
         for (int i = 0; i <= world.rank(); ++i) world.control().count_step();
         return std::string();
       }))
    CHECK_THAT(said, Contains("have made 1 on one rank and 2 on another"));
}

TEST_CASE("nccl: calls that differ at the end of a world are an error of its end", "[comm]") {
  const std::vector<std::string> all = nccl_threads(2, [](World& world) {
    const auto memory = world.allocate_symmetric(4096);
    world.barrier();
    const Collective gather{.send = memory->data(),
                            .recv = memory->data() + 1024,
                            .count = 16,
                            .kind = CollectiveKind::all_gather,
                            .dtype = world.rank() == 0 ? DType::f32 : DType::i32};
    world.control().submit(gather, "the last", {});
    return std::string("ended");
  });
  for (const std::string& said : all) CHECK_THAT(said, Contains("f32") && Contains("i32"));
}

TEST_CASE("nccl: who does not come to where symmetric memory is made is listed", "[comm]") {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<std::string> all = nccl_threads(
      3,
      [](World& world) {
        if (world.rank() != 1) world.allocate_symmetric(4096, "a test");
        std::this_thread::sleep_for(std::chrono::seconds(world.rank() == 1 ? 3 : 0));
        return std::string("ended");
      },
      {}, [](int, WorldOptions& options) { options.init_timeout_seconds = 2; });
  for (const std::size_t r : {0u, 2u})
    CHECK_THAT(all[r], Contains("for 2 s (init_timeout_seconds) these ranks have not come to "
                                "allocation 1 of group 0: 1"));
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));
}

TEST_CASE("nccl: a first call that a rank does not come to says which", "[comm]") {
  const std::vector<std::string> all = nccl_threads(
      2,
      [](World& world) {
        const auto memory = world.allocate_symmetric(4096);
        world.barrier();
        if (world.rank() == 0)
          world.gather().submit({.send = memory->data(), .recv = memory->data(), .count = 1},
                                "alone", {});
        std::this_thread::sleep_for(std::chrono::seconds(4));
        return std::string("ended");
      },
      {}, [](int, WorldOptions& options) { options.init_timeout_seconds = 1; });
  CHECK_THAT(all[0],
             Contains("ncclCommSplit for the first call on 'gather' of 'world' has taken") &&
                 Contains("not all ranks have come to it"));
}
