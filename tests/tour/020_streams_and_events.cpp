// Lesson 20: streams, events, clocks.
//
// A stream is a queue of work: what you launch on one stream runs in order, what you launch on two
// may run at the same time. An event marks a point in one stream; another stream that waits for it
// starts its later work after that point.
//
//   compute   ── fill ──┬──────────────── wait ── double ──▶ time
//                       │ record           ▲
//                       ▼                  │ record
//   gather    ──────── wait ──── copy ─────┘
//
// These edges are the only order between streams. A clock in every stream counts what it comes
// after.
//
// PyTorch: torch.cuda.Stream and Event are the same idea, with `wait_event` for `wait` and
// `synchronize` for `block`. PyTorch keeps no clock, so a wait that is missing goes unnoticed until
// a value is wrong, and one that is not needed is queued all the same.
#include <algorithm>
#include <array>
#include <atomic>
#include <iomanip>
#include <iostream>
#include <numeric>
#include <thread>

#include "tessera/device/device.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

static void print(const char* what, const ts::Clock& clock) {
  std::cout << "   " << std::left << std::setw(26) << what << "compute "
            << clock[ts::StreamId::compute] << ", gather " << clock[ts::StreamId::gather] << '\n';
}

// Two streams without an edge overlap: each body here ends only when it has seen the other begin.
static void streams_run_side_by_side() {
  const ts::Device device = ts::Device::cpu();
  std::atomic<int> here = 0;
  const auto meet = [p = &here](ts::Exec&) {
    ++*p;
    while (*p < 2) std::this_thread::yield();
  };
  // A launch returns at once; the body runs on a thread of its stream.
  device.compute().launch({.name = "meet"}, meet);
  device.gather().launch({.name = "meet"}, meet);
  device.synchronize();  // the host blocks until both are done
  std::cout << "1. Two streams met while both were running.\n";
  CHECK(here == 2);
}

// The picture above, in code.
static void events_order_streams() {
  const ts::Device device = ts::Device::cpu();
  const ts::Stream compute = device.compute(), gather = device.gather();
  std::array<int, 4> source{}, copy{};
  int *const s = source.data(), *const c = copy.data();

  compute.launch({.name = "fill"}, [s](ts::Exec&) { std::iota(s, s + 4, 1); });
  gather.wait(compute.record());  // without it, `copy` could read before `fill` has written
  gather.launch({.name = "copy"}, [s, c](ts::Exec&) { std::copy(s, s + 4, c); });
  compute.wait(gather.record());  // without it, `double` could write while `copy` reads
  compute.launch({.name = "double"},
                 [s](ts::Exec&) { std::transform(s, s + 4, s, [](int x) { return 2 * x; }); });
  device.block(compute.record());

  std::cout << "2. source";
  for (const int value : source) std::cout << ' ' << value;
  std::cout << ", copy";
  for (const int value : copy) std::cout << ' ' << value;
  std::cout << '\n';
  CHECK((source == std::array{2, 4, 6, 8}));
  CHECK((copy == std::array{1, 2, 3, 4}));
}

// A launch ticks its stream's clock, `record` takes a snapshot, `wait` merges it, and a host that
// blocks learns it.
static void clocks_count_what_is_ordered() {
  const ts::Device device = ts::Device::cpu();
  const ts::Stream compute = device.compute(), gather = device.gather();
  for (int i = 0; i < 3; ++i) compute.launch({.name = "work"}, [](ts::Exec&) {});
  const ts::Event event = compute.record();
  gather.launch({.name = "work"}, [](ts::Exec&) {});
  std::cout << "3. Clocks: for each stream, the last operation that this one comes after.\n";
  print("gather before the wait", gather.clock());
  CHECK(gather.clock()[ts::StreamId::compute] == 0);
  gather.wait(event);
  print("gather after it", gather.clock());
  CHECK(gather.clock()[ts::StreamId::compute] == 3 && gather.clock()[ts::StreamId::gather] == 1);
  gather.wait(event);  // free: the clock covers it, so nothing is submitted

  print("the host", device.clock());
  device.block(gather.record());
  print("the host, having blocked", device.clock());
  CHECK(device.clock()[ts::StreamId::compute] == 3);  // heard of through gather
}

// A forgotten wait shows only now and then. An executor of the tests tries orders, and a seed
// repeats one exactly.
static void a_seed_finds_a_missing_edge() {
  int stale = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    int value = 0, seen = 0;
    const ts::Device device = ts::Device::cpu({.executor = ts::testing::shuffled(seed)});
    device.compute().launch({.name = "write"}, [v = &value](ts::Exec&) { *v = 1; });
    device.gather().launch({.name = "read"}, [v = &value, s = &seen](ts::Exec&) { *s = *v; });
    device.synchronize();
    stale += seen == 0;
  }
  std::cout << "4. Without an edge, " << stale << " of 20 seeds read before the write.\n";
  CHECK(stale > 0 && stale < 20);
}

int main() {
  streams_run_side_by_side();
  events_order_streams();
  clocks_count_what_is_ordered();
  a_seed_finds_a_missing_edge();
}
