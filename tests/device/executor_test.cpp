// One behaviour suite for every executor that runs bodies. A new one is finished when its line is
// added below.
#include <atomic>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/device/cpu_check.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/device/workers.hpp"
#include "tests/device/ranks.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using tessera::testing::any_executor;

namespace {

// A random program over a few cells and streams. Each operation mixes some cells into another;
// before it the stream waits for the last writers and readers that it must not overtake. So any
// executor must get what a plain loop gets.
struct Hazards {
  static constexpr int kCells = 6;
  std::uint64_t cells[kCells] = {};
  Event last_write[kCells];
  std::vector<Event> reads[kCells];

  void step(const Device& device, std::mt19937_64& rng) {
    const Stream stream = device.stream(static_cast<StreamId>(rng() % 5));
    const std::size_t target = rng() % kCells, a = rng() % kCells, b = rng() % kCells;
    for (const std::size_t cell : {target, a, b}) stream.wait(last_write[cell]);
    for (const Event& read : reads[target]) stream.wait(read);
    std::uint64_t* const p = cells;
    stream.launch({.name = "mix"},
                  [p, target, a, b](Exec&) { p[target] = p[target] * 31 + p[a] * 7 + p[b] + 1; });
    const Event done = stream.record();
    last_write[target] = done;
    reads[target].clear();
    for (const std::size_t cell : {a, b})
      if (cell != target) reads[cell].push_back(done);
  }
};

std::vector<std::string> log_lines;

}  // namespace

TEST_CASE("names of the executors") {
  CHECK(name(ExecutorKind::threaded) == "threaded");
  CHECK(name(ExecutorKind::inlined) == "inline");
  CHECK(name(testing::shuffled(0)) == "shuffled");
  CHECK(name(ExecutorKind::virtual_) == "virtual");
}

TEST_CASE("a stream runs its bodies in the order of submission", "[threads]") {
  const Device device = Device::cpu({.executor = any_executor(3)});
  std::vector<int> order;
  std::vector<int>* const out = &order;
  for (int i = 0; i < 5000; ++i)  // more than a queue holds
    device.compute().launch({.name = "push"}, [out, i](Exec&) { out->push_back(i); });
  device.block(device.compute().record());
  REQUIRE(order.size() == 5000);
  for (int i = 0; i < 5000; ++i) REQUIRE(order[static_cast<std::size_t>(i)] == i);
}

TEST_CASE("events order streams: a random program gives what a plain loop gives", "[threads]") {
  const std::uint64_t seed = testing::fresh_seed();
  const ExecutorChoice executor = any_executor(seed);
  INFO("executor " << name(executor) << ", seed " << seed);
  Hazards expected, got;
  {
    std::mt19937_64 rng(seed);
    const Device device = Device::cpu({.executor = ExecutorKind::inlined});
    for (int i = 0; i < 3000; ++i) expected.step(device, rng);
  }
  {
    std::mt19937_64 rng(seed);
    const Device device = Device::cpu({.executor = executor});
    for (int i = 0; i < 3000; ++i) got.step(device, rng);
    device.synchronize();
  }
  for (int i = 0; i < Hazards::kCells; ++i) CHECK(got.cells[i] == expected.cells[i]);
}

TEST_CASE("the end of the last handle waits for all work", "[threads]") {
  const ExecutorChoice executor = any_executor();
  int count = 0;
  int* const p = &count;
  {
    const Device device = Device::cpu({.executor = executor});
    for (int i = 0; i < 100; ++i) device.compute().launch({.name = "add"}, [p](Exec&) { ++*p; });
    device.gather().wait(device.compute().record());
    device.gather().launch({.name = "add"}, [p](Exec&) { ++*p; });
  }
  CHECK(count == 101);
}

TEST_CASE("a body sees its rank, its stream and its threads", "[threads]") {
  const Device device = Device::cpu({.executor = any_executor(), .rank = 3, .threads = 2});
  Exec seen;
  Exec* const p = &seen;
  std::int64_t sum = 0;
  std::int64_t* const s = &sum;
  device.reduce().launch({.name = "look"}, [p, s](Exec& exec) {
    *p = exec;
    std::int64_t squares[100];
    parallel_for(exec, 100, [&](std::int64_t i) { squares[i] = i * i; });
    for (const std::int64_t square : squares) *s += square;
  });
  device.synchronize();
  CHECK(seen.rank == 3);
  CHECK(seen.stream == StreamId::reduce);
  CHECK(seen.phase == Exec::Phase::run);
  REQUIRE(seen.workers != nullptr);
  CHECK(seen.workers->threads() == 2);
  CHECK(sum == 99 * 100 * 199 / 6);
}

TEST_CASE("a body that throws surfaces at every blocking call, and later bodies do not run",
          "[threads]") {
  const Device device = Device::cpu({.executor = any_executor(), .rank = 2});
  int after = 0;
  int* const p = &after;
  device.compute().launch({.name = "good"}, [](Exec&) {});
  device.compute().launch({.name = "bad"}, [](Exec&) { throw DataError("bad: value 7 is odd"); });
  device.compute().launch({.name = "after"}, [p](Exec&) { ++*p; });
  device.gather().wait(device.compute().record());
  device.gather().launch({.name = "after"}, [p](Exec&) { ++*p; });
  CHECK_THROWS_AS(device.block(device.gather().record()), DataError);
  device.compute().launch({.name = "later"}, [p](Exec&) { ++*p; });
  CHECK_THROWS_WITH(device.block(device.compute().record()), "bad: value 7 is odd");
  try {
    device.synchronize();
    FAIL("synchronize did not throw");
  } catch (const Error& e) {
    CHECK(e.rank() == 2);
  }
  CHECK(after == 0);
}

TEST_CASE("what needs nothing of a failure runs to its end", "[threads]") {
  const ExecutorChoice executor = any_executor();
  const Device device = Device::cpu({.executor = executor});
  const bool is_one_thread = executor == ExecutorKind::inlined;  // to which all comes behind it
  std::atomic<int> ran = 0;
  const auto add = [&ran](int n) { return [at = &ran, n](Exec&) { *at += n; }; };
  const Stream compute = device.compute(), gather = device.gather(), reduce = device.reduce();
  compute.launch({.name = "before"}, add(1));
  gather.wait(compute.record());
  gather.launch({.name = "bad"}, [](Exec&) { throw DataError("value 7 is odd"); });
  gather.launch({.name = "behind it"}, add(1000));
  compute.launch({.name = "beside it"}, add(10));
  reduce.wait(gather.record());
  reduce.launch({.name = "behind it, by an event"}, add(1000));
  const Event all = reduce.record();
  for (int i = 0; i < 3; ++i) compute.launch({.name = "beside it"}, add(100));
  device.context().commit();
  compute.wait(all);
  compute.launch({.name = "behind it, by two events"}, add(1000));
  CHECK_THROWS_WITH(device.synchronize(), "value 7 is odd");
  device.context().recover();
  CHECK(ran == (is_one_thread ? 1 : 311));
  const Lost& lost = device.context().lost();
  CHECK(lost.first[StreamId::compute] == (is_one_thread ? 2 : 6));
  CHECK(lost.first[StreamId::gather] == 1);
  CHECK(lost.first[StreamId::reduce] == 1);
  CHECK(device.context().has_lost_committed());
  compute.launch({.name = "next"}, add(5));
  device.synchronize();
  CHECK(ran == (is_one_thread ? 6 : 316));
}

TEST_CASE("a failure that nobody asked for is logged once when the device ends", "[threads]") {
  const ExecutorChoice executor = any_executor();
  const bool asked = GENERATE(false, true);
  log_lines.clear();
  set_log_sink([](LogLevel, const std::string& message) { log_lines.push_back(message); });
  {
    const Device device = Device::cpu({.executor = executor, .rank = 1});
    device.compute().launch({.name = "bad"},
                            [](Exec&) { throw std::runtime_error("out of paper"); });
    device.gather().launch({.name = "bad too"},
                           [](Exec&) { throw std::runtime_error("out of paper"); });
    if (asked) CHECK_THROWS_WITH(device.synchronize(), "out of paper");
  }
  set_log_sink({});
  REQUIRE(log_lines.size() == (asked ? 0 : 1));
  if (!asked)
    CHECK_THAT(log_lines[0], Catch::Contains("rank 1") && Catch::Contains("out of paper"));
}

TEST_CASE("blocked_seconds counts the host's sleep", "[threads]") {
  const Device device = Device::cpu();
  // On a busy machine the host may come to block when the nap is over; in one of many rounds it
  // does not.
  double once = 0;
  for (int round = 0; once < 0.010 && round < 100; ++round) {
    device.compute().launch(
        {.name = "nap"}, [](Exec&) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
    const Event event = device.compute().record();
    const double before = device.context().blocked_seconds();
    device.block(event);
    const double after = device.context().blocked_seconds();
    once = after - before;
    device.block(event);
    CHECK(device.context().blocked_seconds() == after);
  }
  CHECK(once >= 0.010);
}

TEST_CASE("virtual runs no body and leaves the clocks as every executor does") {
  const Device device = Device::cpu({.executor = ExecutorKind::virtual_});
  CHECK_FALSE(device.runs_bodies());
  AbortSignal abort_signal;
  CollectiveBarrier barrier(abort_signal, 2);
  int ran = 0;
  int* const p = &ran;
  device.compute().launch({.name = "never"}, [p](Exec&) { ++*p; });
  device.gather().launch_collective({.name = "alone"}, &barrier, [p](Exec&) { ++*p; });
  device.block(device.gather().record());
  device.synchronize();
  CHECK(ran == 0);
  CHECK(device.context().host_clock()[StreamId::compute] == 1);
}

TEST_CASE("options out of range are refused") {
  CHECK_THROWS_AS(Device::cpu({.rank = -1}), ContractError);
  CHECK_THROWS_AS(Device::cpu({.threads = 0}), ContractError);
}

TEST_CASE("the processor check knows the levels of x86-64") {
  // This very test runs, so the processor has what the kernels were built for; nobody lacks the
  // empty level.
  CHECK(missing_cpu_feature(kernel_arch()).empty());
  CHECK(missing_cpu_feature("").empty());
}
