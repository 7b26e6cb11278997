// What ranks of one process see when they disagree, when one of them fails, and when one ends
// early.
#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "tessera/comm/world.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/race_check.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::executors;
using tessera::testing::run_checked;

namespace {

// What each rank caught as CommError (or else "type: message"), and what run_local rethrew.
struct Outcome {
  std::vector<std::string> by_rank;
  std::string rethrown;
  int rank = -2;
};

Outcome run_and_catch(int ranks, const ExecutorChoice& executor,
                      const std::function<void(World&)>& body) {
  Outcome outcome;
  outcome.by_rank.resize(static_cast<std::size_t>(ranks));
  try {
    run_checked(ranks, {.executor = executor}, [&](World& world) {
      std::string& mine = outcome.by_rank[static_cast<std::size_t>(world.rank())];
      try {
        body(world);
        world.device().synchronize();
      } catch (const CommError& error) {
        mine = error.what();
        throw;
      } catch (const std::exception& error) {
        mine = concat("other: ", error.what());
        throw;
      }
    });
  } catch (const Error& error) {
    outcome.rethrown = error.what();
    outcome.rank = error.rank();
  } catch (const std::exception& error) {
    outcome.rethrown = concat("other: ", error.what());
  }
  return outcome;
}

struct Buffers {
  float values[64] = {};
};

Collective collective(Buffers& b, CollectiveKind kind, std::int64_t count, DType dtype = f32,
                      int root = 0) {
  return {.send = b.values,
          .recv = b.values + 32,
          .count = count,
          .kind = kind,
          .dtype = dtype,
          .root = root};
}

}  // namespace

TEST_CASE("every rank hears which two ranks disagree, about what, in which call",
          "[comm][threads]") {
  struct Mismatch {
    const char* what;
    std::function<void(Communicator&, Buffers&, bool odd)> submit;
    const char *first, *second;  // how the message names the two operations
  };
  using K = CollectiveKind;
  const Mismatch mismatches[] = {
      {"kind",
       [](Communicator& c, Buffers& b, bool odd) {
         c.submit(collective(b, odd ? K::all_reduce : K::broadcast, 4), "unit", {});
       },
       "broadcast of 4 x f32 from rank 0", "all_reduce of 4 x f32"},
      {"count",
       [](Communicator& c, Buffers& b, bool odd) {
         c.submit(collective(b, K::all_gather, odd ? 7 : 8), "unit", {});
       },
       "all_gather of 8 x f32", "all_gather of 7 x f32"},
      {"dtype",
       [](Communicator& c, Buffers& b, bool odd) {
         c.submit(collective(b, K::reduce_scatter, 4, odd ? i32 : f32), "unit", {});
       },
       "reduce_scatter of 4 x f32", "reduce_scatter of 4 x i32"},
      {"root",
       [](Communicator& c, Buffers& b, bool odd) {
         c.submit(collective(b, K::broadcast, 4, f32, odd ? 1 : 2), "unit", {});
       },
       "from rank 2", "from rank 1"},
      {"name",
       [](Communicator& c, Buffers& b, bool odd) {
         c.submit(collective(b, K::all_gather, 4), odd ? "unit b" : "unit a", {});
       },
       "'unit a'", "'unit b'"},
      {"order",
       [](Communicator& c, Buffers& b, bool odd) {
         c.submit(collective(b, odd ? K::all_gather : K::reduce_scatter, 2),
                  odd ? "gather" : "reduce", {});
         c.submit(collective(b, odd ? K::reduce_scatter : K::all_gather, 2),
                  odd ? "reduce" : "gather", {});
       },
       "'reduce' (1 item; item 0: reduce_scatter", "'gather' (1 item; item 0: all_gather"},
      {"barrier against data",
       [](Communicator& c, Buffers& b, bool odd) {
         c.submit(odd ? Collective{} : collective(b, K::all_reduce, 1), "meet", {});
       },
       "all_reduce of 1 x f32", "barrier"},
  };
  for (const ExecutorChoice& executor : executors())
    for (const Mismatch& mismatch : mismatches) {
      INFO(mismatch.what << " on " << name(executor));
      const Outcome outcome = run_and_catch(3, executor, [&](World& world) {
        Buffers buffers;
        world.gather().submit(collective(buffers, K::all_gather, 3), "before", {});
        mismatch.submit(world.gather(), buffers, world.rank() == 1);
        world.device().synchronize();
      });
      for (const std::string& message : outcome.by_rank) {
        CHECK_THAT(message, Contains("rank 0 submitted") && Contains("rank 1 submitted"));
        CHECK_THAT(message, Contains(mismatch.first) && Contains(mismatch.second));
        CHECK_THAT(message, Contains("communicator 'gather', call 2"));
      }
      CHECK_THAT(outcome.rethrown, Contains("rank 1 submitted"));
      CHECK(outcome.rank >= 0);
    }
}

TEST_CASE("a group that differs in one item or in length is told apart", "[comm][threads]") {
  for (const ExecutorChoice& executor : executors())
    for (const bool longer : {false, true}) {
      const Outcome outcome = run_and_catch(2, executor, [&](World& world) {
        Buffers b[4];
        CollectiveGroup group("unit");
        for (int i = 0; i < 3; ++i)
          group.edit().push_back(collective(b[i], CollectiveKind::all_gather, 1 + i));
        if (world.rank() == 1 && longer)
          group.edit().push_back(collective(b[3], CollectiveKind::all_gather, 1));
        if (world.rank() == 1 && !longer) group.edit()[2].count = 9;
        world.gather().submit(group, {});
        world.device().synchronize();
      });
      INFO(name(executor));
      for (const std::string& message : outcome.by_rank) {
        if (longer)
          CHECK_THAT(message,
                     Contains("(3 items)") && Contains("(4 items; item 3: all_gather of 1 x f32)"));
        else
          CHECK_THAT(message, Contains("item 2: all_gather of 3 x f32") &&
                                  Contains("item 2: all_gather of 9 x f32"));
      }
    }
}

TEST_CASE("a rank that throws is named to its peers, and its exception is rethrown",
          "[comm][threads]") {
  for (const ExecutorChoice& executor : executors())
    for (int thrower = 0; thrower < 3; ++thrower) {
      INFO("rank " << thrower << " on " << name(executor));
      const Outcome outcome = run_and_catch(3, executor, [&](World& world) {
        world.sum(1.0);
        if (world.rank() == thrower) throw std::runtime_error("the disk is full");
        world.sum(2.0);
      });
      CHECK(outcome.rethrown == "other: the disk is full");
      for (int r = 0; r < 3; ++r)
        if (r != thrower)
          CHECK_THAT(outcome.by_rank[static_cast<std::size_t>(r)],
                     Contains(concat("rank ", thrower, " failed: the disk is full")));
    }
}

TEST_CASE("a rank whose kernel throws is named to its peers, with its rank", "[comm][threads]") {
  for (const ExecutorChoice& executor : executors()) {
    INFO(name(executor));
    const Outcome outcome = run_and_catch(3, executor, [&](World& world) {
      const bool fails = world.rank() == 2;
      world.device().compute().launch({.name = "kernel"}, [fails](Exec&) {
        if (fails) throw DataError("token 70000 is no token");
      });
      world.sum(1.0);
    });
    CHECK(outcome.rethrown == "token 70000 is no token");
    CHECK(outcome.rank == 2);
    for (int r = 0; r < 2; ++r)
      CHECK_THAT(outcome.by_rank[static_cast<std::size_t>(r)],
                 Contains("rank 2") && Contains("'kernel'") && Contains("token 70000"));
  }
}

TEST_CASE("a rank that ends before its peers' collective is named, not waited for",
          "[comm][threads]") {
  for (const ExecutorChoice& executor : executors())
    for (int early = 0; early < 2; ++early) {
      INFO("rank " << early << " ends early on " << name(executor));
      const Outcome outcome = run_and_catch(2, executor, [&](World& world) {
        world.sum(1.0);
        if (world.rank() != early) world.sum(2.0);
      });
      CHECK(outcome.by_rank[static_cast<std::size_t>(early)].empty());
      CHECK_THAT(outcome.by_rank[static_cast<std::size_t>(1 - early)],
                 Contains(concat("rank ", early, " has ended after 1 calls")) &&
                     Contains(concat("rank ", 1 - early, " submitted call 2")));
      CHECK(outcome.rank == 1 - early);
    }
}

TEST_CASE("a collective that waits too long names who is missing and where everyone is",
          "[comm][threads]") {
  for (const ExecutorKind executor : {ExecutorKind::threaded, ExecutorKind::inlined}) {
    INFO(name(executor));
    std::vector<std::string> heard(3);
    std::vector<double> waited(3);
    std::atomic<int> given_up = 0;
    CHECK_THROWS_AS(
        run_local(
            3, {.executor = executor, .timeout_seconds = 1},
            [&](World& world) {
              const auto at = static_cast<std::size_t>(world.rank());
              world.sum(1.0);
              while (world.rank() == 1 && given_up < 2)
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
              const auto start = std::chrono::steady_clock::now();
              try {
                world.barrier();
              } catch (const CommError& error) {
                heard[at] = error.what();
                waited[at] =
                    std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
                ++given_up;
                throw;
              }
            }),
        CommError);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      CHECK_THAT(heard[rank], Contains("call 2, 'barrier' on 'control' (barrier), has taken 1 s") &&
                                  Contains("missing are ranks 1;") &&
                                  Contains("rank 1 has submitted 1 call, last 'sum'"));
      CHECK(waited[rank] < 2);  // the timeout and a second
    }
  }
}

TEST_CASE("after a failed run the next one works", "[comm][threads]") {
  for (const ExecutorChoice& executor : executors()) {
    CHECK_THROWS_AS(run_checked(2, {.executor = executor},
                                [](World& world) {
                                  if (world.rank() == 0) throw DataError("once");
                                  world.barrier();
                                }),
                    DataError);
    std::mutex mutex;
    double total = 0;
    run_checked(2, {.executor = executor}, [&](World& world) {
      const double sum = world.sum(1.5);
      const std::lock_guard lock(mutex);
      total += sum;
    });
    CHECK(total == 6.0);
  }
}
