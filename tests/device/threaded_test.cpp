// What only threads can show: streams run at the same time, and time spent waiting is told apart
// from time spent working.
#include <atomic>
#include <chrono>
#include <thread>

#include "runtime/device/executors/counter.hpp"
#include "runtime/device/executors/runner.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;

namespace {

using std::chrono::milliseconds;

// Counts itself in and sleeps until both are there; false when the other does not come within 10 s.
bool meet(std::atomic<int>& here) {
  here.fetch_add(1);
  for (int i = 0; i < 10000 && here.load() < 2; ++i) std::this_thread::sleep_for(milliseconds(1));
  return here.load() >= 2;
}

}  // namespace

TEST_CASE("of what is lost the first is the least, whoever tells of it first") {
  Failure failure;
  for (const Tick tick : {13, 10, 12}) failure.lose(StreamId::offload, tick, tick != 10);
  const Lost lost = failure.forget();
  CHECK(lost.first[StreamId::offload] == 10);
  CHECK(lost.failed[StreamId::offload] == 12);
  CHECK(lost.first[StreamId::compute] == 0);
}

TEST_CASE("two streams run at the same time", "[threads]") {
  const Device device = Device::cpu();
  std::atomic<int> here = 0;
  bool met[2] = {};
  std::atomic<int>* const h = &here;
  bool* const m = met;
  device.compute().launch({.name = "one"}, [h, m](Exec&) { m[0] = meet(*h); });
  device.gather().launch({.name = "other"}, [h, m](Exec&) { m[1] = meet(*h); });
  device.synchronize();
  CHECK(met[0]);
  CHECK(met[1]);
}

TEST_CASE("the host runs ahead of a busy stream until the queue is full, and loses nothing",
          "[threads]") {
  const Device device = Device::cpu();
  std::atomic<bool> go = false;
  std::atomic<bool>* const g = &go;
  long count = 0;
  long* const c = &count;
  device.compute().launch({.name = "gate"}, [g](Exec&) { g->wait(false); });
  for (int i = 0; i < 1000; ++i) device.compute().launch({.name = "add"}, [c](Exec&) { ++*c; });
  CHECK(count == 0);  // the gate is closed, yet the host is here: submitting did not wait
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(20));
    go = true;
    go.notify_all();
  });
  for (int i = 0; i < 4000; ++i) device.compute().launch({.name = "add"}, [c](Exec&) { ++*c; });
  device.synchronize();
  opener.join();
  CHECK(count == 5000);
}

TEST_CASE("waited_seconds counts waits for other streams and nothing else", "[threads]") {
  const Device device = Device::cpu();
  Executor& executor = device.context().executor();
  // On a busy machine compute's worker may come to its wait when most of the nap is over; in one of
  // many rounds it does not. However late anybody is, it has waited outside of its own naps.
  double waited = 0, longest = 0;
  int rounds = 0;
  const auto start = std::chrono::steady_clock::now();
  for (; longest < 0.015 && rounds < 100; ++rounds) {
    device.gather().launch({.name = "slow gather"},
                           [](Exec&) { std::this_thread::sleep_for(milliseconds(30)); });
    device.compute().wait(device.gather().record());
    device.compute().launch({.name = "use"},
                            [](Exec&) { std::this_thread::sleep_for(milliseconds(30)); });
    device.synchronize();
    longest = executor.waited_seconds(StreamId::compute) - waited;
    waited += longest;
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  CHECK(longest >= 0.015);
  CHECK(waited <= taken.count() - 0.03 * rounds + 1e-9);  // a nanosecond for sums in f64
  CHECK(executor.waited_seconds(StreamId::gather) == 0);

  const double before = executor.waited_seconds(StreamId::compute);
  device.compute().launch({.name = "idle before"}, [](Exec&) {});
  device.synchronize();
  device.compute().wait(device.gather().record());
  CHECK(executor.waited_seconds(StreamId::compute) == before);
}

TEST_CASE("an edge through a stream without work of its own holds", "[threads]") {
  // gather has nothing but a wait between them, so its event has tick 0: what counts is the clock
  // that it carries.
  for (int round = 0; round < 200; ++round) {
    const Device device = Device::cpu();
    int value = 0, seen = 0;
    int *const v = &value, *const s = &seen;
    device.compute().launch({.name = "write"}, [v](Exec&) {
      std::this_thread::yield();
      *v = 1;
    });
    device.gather().wait(device.compute().record());
    device.reduce().wait(device.gather().record());
    device.reduce().launch({.name = "read"}, [v, s](Exec&) { *s = *v; });
    device.synchronize();
    REQUIRE(seen == 1);
  }
}

TEST_CASE("a counter wakes every sleeper at its target", "[threads]") {
  Counter counter;
  constexpr int kSleepers = 4;
  std::atomic<int> early = 0;
  std::vector<std::thread> sleepers;
  for (int i = 0; i < kSleepers; ++i)
    sleepers.emplace_back([&, i] {
      for (std::uint64_t target = static_cast<std::uint64_t>(i) + 1; target <= 2000; target += 3) {
        counter.wait_for(target);
        if (counter.load() < target) ++early;
      }
    });
  for (std::uint64_t value = 1; value <= 2000; ++value) {
    counter.advance(value);
    if (value % 16 == 0) std::this_thread::yield();
  }
  for (std::thread& sleeper : sleepers) sleeper.join();  // a lost wake-up would hang here
  CHECK(early == 0);
}
