// The shuffled executor: the seed decides, reproducibly, and what a program forgot to order shows.
#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.hpp"
#include "tests/device/ranks.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using tessera::testing::Ranks;

namespace {

constexpr int kSeeds = 64;

// Two operations on two streams without an edge. Returns their order, "ab" or "ba".
std::string order_of_two(std::uint64_t seed) {
  const Device device = Device::cpu({.executor = testing::shuffled(seed)});
  std::string order;
  std::string* const out = &order;
  device.compute().launch({.name = "a"}, [out](Exec&) { *out += 'a'; });
  device.gather().launch({.name = "b"}, [out](Exec&) { *out += 'b'; });
  device.synchronize();
  return order;
}

// What a reader on gather sees of a writer on compute, with or without the edge between them.
int read_after_write(std::uint64_t seed, bool with_edge) {
  int value = 0, seen = -1;
  int *const v = &value, *const s = &seen;
  const Device device = Device::cpu({.executor = testing::shuffled(seed)});
  device.compute().launch({.name = "write"}, [v](Exec&) { *v = 1; });
  if (with_edge) device.gather().wait(device.compute().record());
  device.gather().launch({.name = "read"}, [v, s](Exec&) { *s = *v; });
  device.block(device.gather().record());
  return seen;
}

// A few steps of three ranks with work beside a collective.
std::uint64_t trace_of_three_ranks(std::uint64_t seed) {
  std::uint64_t trace = 0;
  Ranks ranks(testing::shuffled(seed, &trace), 3);
  const auto thrown = ranks.run([&](const Device& device, int) {
    for (int step = 0; step < 4; ++step) {
      for (int i = 0; i < 3; ++i) device.compute().launch({.name = "work"}, [](Exec&) {});
      device.gather().launch_collective({.name = "gather"}, &ranks.barrier, [](Exec&) {});
      device.reduce().launch({.name = "copy"}, [](Exec&) {});
      device.compute().wait(device.gather().record());
      device.compute().launch({.name = "use"}, [](Exec&) {});
      device.block(device.compute().record());
    }
  });
  for (const std::string& message : thrown) CHECK(message == "");
  return trace;
}

}  // namespace

TEST_CASE("both orders of two operations without an edge occur") {
  std::set<std::string> orders;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) orders.insert(order_of_two(seed));
  CHECK(orders == std::set<std::string>{"ab", "ba"});
}

TEST_CASE("a missing edge is found by some seed, and no seed finds one that is there") {
  int stale = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    stale += read_after_write(seed, false) == 0;
    REQUIRE(read_after_write(seed, true) == 1);
  }
  // Were the two orders equally likely at each seed, 64 seeds would all agree with probability
  // 2^-63.
  CHECK(stale > 0);
  CHECK(stale < kSeeds);
}

TEST_CASE("same program and seed, same trace; other seeds, other traces", "[threads]") {
  const std::uint64_t base = testing::fresh_seed();
  INFO("first seed " << base);
  std::set<std::uint64_t> traces;
  for (std::uint64_t seed = base; seed < base + 64; ++seed) {
    const std::uint64_t trace = trace_of_three_ranks(seed);
    REQUIRE(trace_of_three_ranks(seed) == trace);
    traces.insert(trace);
  }
  // Three in ten seeds draw anew at dozens of choices (see Note [A mix of schedules]), and no two
  // of those agree; the others keep priorities and may. Fewer than 4 of the former among 64: (1 +
  // 27 + 370 + 3278) 0.7^64, one run in two million.
  CHECK(traces.size() >= 4);
}

TEST_CASE("some seed lets a stream run far behind, some far ahead") {
  // The gather runs before the first of 12 operations on compute, or after the last: even choices
  // reach the second only once in 2^12, priorities in every other seed that has them.
  int first = 0, last = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Device device = Device::cpu({.executor = testing::shuffled(seed)});
    int done = 0, at = -1;
    int *const d = &done, *const a = &at;
    for (int i = 0; i < 12; ++i) device.compute().launch({.name = "work"}, [d](Exec&) { ++*d; });
    device.gather().launch({.name = "gather"}, [d, a](Exec&) { *a = *d; });
    device.synchronize();
    first += at == 0;
    last += at == 12;
  }
  CHECK(first > 0);
  CHECK(last > 0);
}

TEST_CASE("only one thread runs at a time", "[threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  Ranks ranks(testing::shuffled(seed), 4);
  // Atomics, because a thread sanitizer sees bodies as streams that only events order.
  struct Section {
    std::atomic<bool> busy{false};
    std::atomic<int> passed{0}, met{0};
    void pass() {
      if (busy.exchange(true)) ++met;
      std::this_thread::yield();
      ++passed;
      busy = false;
    }
  } section;
  Section* const p = &section;
  const auto thrown = ranks.run([&](const Device& device, int) {
    for (int i = 0; i < 50; ++i) {
      section.pass();
      device.compute().launch({.name = "pass"}, [p](Exec&) { p->pass(); });
      if (i % 3 == 0) device.synchronize();
    }
  });
  for (const std::string& message : thrown) CHECK(message == "");
  CHECK(section.passed == 4 * 50 * 2);
  CHECK(section.met == 0);
}

TEST_CASE("a deadlock is an error that names each rank and what it waits for", "[threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  Ranks ranks(testing::shuffled(seed), 2);
  CollectiveBarrier second(ranks.abort_signal, 2);
  const auto thrown = ranks.run([&](const Device& device, int rank) {
    CollectiveBarrier* const barrier =
        rank == 0 ? &ranks.barrier : &second;  // rank 1 calls another collective
    device.gather().launch_collective({.name = rank == 0 ? "all_gather" : "reduce_scatter"},
                                      barrier, [](Exec&) {});
    device.compute().wait(device.gather().record());
    device.compute().launch({.name = "use"}, [](Exec&) {});
    device.block(device.compute().record());
  });
  for (const std::string& message : thrown) {
    CHECK_THAT(message, Catch::Contains("no rank can go on"));
    CHECK_THAT(message, Catch::Contains("rank 0: host blocks on compute@1") &&
                            Catch::Contains("gather is at 'all_gather'@1") &&
                            Catch::Contains("compute waits for gather@1"));
    CHECK_THAT(message, Catch::Contains("rank 1: host blocks on compute@1") &&
                            Catch::Contains("gather is at 'reduce_scatter'@1"));
  }
}

TEST_CASE("a rank that leaves early is named to the one that waits for it", "[threads]") {
  Ranks ranks(testing::shuffled(5), 2);
  const auto thrown = ranks.run([&](const Device& device, int rank) {
    if (rank == 1) return;
    device.gather().launch_collective({.name = "all_gather"}, &ranks.barrier, [](Exec&) {});
    device.block(device.gather().record());
  });
  CHECK_THAT(thrown[0],
             Catch::Contains("'all_gather'") && Catch::Contains("rank 1: host has left"));
  CHECK(thrown[1] == "");
}

TEST_CASE("submitting without the baton is refused") {
  const auto scheduler = testing::shuffled(1).make_scheduler(1);
  const Device device = Device::cpu({.executor = testing::shuffled(1), .scheduler = scheduler});
  const auto submit = [&] { device.compute().launch({.name = "early"}, [](Exec&) {}); };
  CHECK_THROWS_WITH(submit(), Catch::Contains("attach"));
  scheduler->attach(0);
  CHECK_THROWS_AS(scheduler->attach(0), ContractError);
  CHECK_THROWS_AS(scheduler->attach(1), ContractError);
  submit();
  device.synchronize();
  scheduler->detach(0);
}

TEST_CASE("a device may outlive its rank's attachment", "[threads]") {
  const auto scheduler = testing::shuffled(1).make_scheduler(1);
  int ran = 0;
  int* const p = &ran;
  {
    const Device device = Device::cpu({.executor = testing::shuffled(1), .scheduler = scheduler});
    scheduler->attach(0);
    device.compute().launch({.name = "late"}, [p](Exec&) { ++*p; });
    scheduler->detach(0);
  }
  CHECK(ran == 1);
}
