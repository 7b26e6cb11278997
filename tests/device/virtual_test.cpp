// The virtual clock: what every program takes by the cost model, against the longest path through
// it.
#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;

namespace {

// Powers of two and small whole numbers: sums of doubles are exact, so all times are compared with
// ==.
constexpr CostModel kExactMachine{.flops_per_second = 1024,
                                  .bytes_per_second = 256,
                                  .launch_seconds = 0.25,
                                  .wire_latency_seconds = 2,
                                  .wire_bytes_per_second = 64};

Device machine(const CostModel& cost, bool run_bodies = false) {
  return Device::cpu({.executor = ExecutorKind::virtual_, .cost = cost, .run_bodies = run_bodies});
}
void launch(const Stream& stream, const Cost& cost) {
  stream.launch({.name = "work", .cost = cost}, [](Exec&) {});
}
Executor& executor(const Device& device) { return device.context().executor(); }

// Begins and ends as observers hear of them.
struct Times final : Observer {
  explicit Times(const Device& d) : device(d) { device.context().add_observer(*this); }
  ~Times() override { device.context().remove_observer(*this); }
  void started(StreamId s, Tick, const char*) override {
    begins.push_back(executor(device).seconds(s));
  }
  void finished(StreamId s, Tick, const char*) override {
    ends.push_back(executor(device).seconds(s));
  }
  Device device;
  std::vector<double> begins, ends;
};

}  // namespace

TEST_CASE("an operation takes what the cost model says") {
  CHECK(kExactMachine.seconds({.flops = 2048, .bytes = 64}) == 2.25);
  CHECK(kExactMachine.seconds({.flops = 1024, .bytes = 512}) == 2.25);
  CHECK(kExactMachine.seconds({}) == 0.25);
  CHECK(kExactMachine.seconds({.bytes = 1e9, .wire_bytes = 128}) == 4);
  CHECK(CostModel{}.seconds({.flops = 1e30, .bytes = 1e30, .wire_bytes = 1e30}) == 0);
}

TEST_CASE("streams run beside each other, and a wait costs what is left of the event") {
  const Device device = machine(kExactMachine);
  const Times times(device);
  launch(device.gather(), {.wire_bytes = 256});  // 0 to 6
  launch(device.compute(), {.flops = 1792});     // 0 to 2
  const Event gathered = device.gather().record();
  device.compute().wait(gathered);              // 2 to 6
  launch(device.compute(), {.flops = 1792});    // 6 to 8
  launch(device.gather(), {.wire_bytes = 64});  // 6 to 9
  device.compute().wait(gathered);              // covered
  CHECK(times.begins == std::vector<double>{0, 0, 6, 6});
  CHECK(times.ends == std::vector<double>{6, 2, 8, 9});
  CHECK(executor(device).waited_seconds(StreamId::compute) == 4);
  CHECK(executor(device).waited_seconds(StreamId::gather) == 0);
  CHECK(executor(device).host_seconds() == 0);
  device.synchronize();
  CHECK(executor(device).host_seconds() == 9);
  launch(device.reduce(), {.flops = 768});  // the host submits at 9
  CHECK(times.begins.back() == 9);
  CHECK(times.ends.back() == 10);
}

TEST_CASE("a slow host is waited for, and that is no waiting for events") {
  CostModel slow = kExactMachine;
  slow.host_seconds = 3;
  const Device device = machine(slow);
  const Times times(device);
  launch(device.compute(), {.flops = 768});      // submitted at 0: 0 to 1
  launch(device.gather(), {.wire_bytes = 128});  // at 3: 3 to 7
  const Event gathered = device.gather().record();
  launch(device.compute(), {.flops = 768});  // at 6: 6 to 7
  device.compute().wait(gathered);           // the host is at 9, the event was at 7
  launch(device.compute(), {.flops = 768});  // at 9: 9 to 10
  CHECK(times.begins == std::vector<double>{0, 3, 6, 9});
  CHECK(times.ends == std::vector<double>{1, 7, 7, 10});
  CHECK(executor(device).waited_seconds(StreamId::compute) == 0);
}

TEST_CASE("bodies run on request, and change no time") {
  for (const bool run : {false, true}) {
    const Device device = machine(kExactMachine, run);
    CHECK(device.runs_bodies() == run);
    int value = 0;
    int* const p = &value;
    device.gather().launch({.name = "set", .cost = {.wire_bytes = 128}}, [p](Exec&) { *p = 3; });
    device.compute().wait(device.gather().record());
    device.compute().launch({.name = "double", .cost = {.flops = 768}}, [p](Exec&) { *p *= 2; });
    device.synchronize();
    CHECK(value == (run ? 6 : 0));
    CHECK(executor(device).host_seconds() == 5);
  }
}

TEST_CASE("a body that throws on the virtual clock fails the device") {
  const Device device = machine(kExactMachine, true);
  device.compute().launch({.name = "bad"}, [](Exec&) { throw DeviceError("told so"); });
  CHECK_THROWS_AS(device.synchronize(), DeviceError);
}

TEST_CASE(
    "a cost model or bodies where nothing is virtual, and bodies of collectives, are refused") {
  CHECK_THROWS_AS(Device::cpu({.cost = kExactMachine}), ContractError);
  CHECK_THROWS_AS(Device::cpu({.executor = ExecutorKind::inlined, .run_bodies = true}),
                  ContractError);
  AbortSignal abort_signal;
  CollectiveBarrier barrier(abort_signal, 2);
  const Device device = machine({}, true);
  device.compute().launch_collective({.name = "barrier"}, &barrier, [](Exec&) {});
  CHECK_THROWS_AS(device.synchronize(), ContractError);
  CHECK(abort_signal.aborted());
}

// Random programs over all streams, with waits for events of any age and hosts that block. The
// reference keeps every operation as a node with the nodes that it follows, and asks for the
// longest path.
TEST_CASE("any program ends at the end of its longest path") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 rng(seed);
  for (int round = 0; round < 50; ++round) {
    const Device device = machine(kExactMachine);
    const Times times(device);
    std::vector<double> ends;                               // of each node
    std::array<std::vector<std::size_t>, kMaxStreams> due;  // nodes that the next one follows
    std::vector<std::pair<Event, std::vector<std::size_t>>> events;
    double host = 0;
    const auto latest = [&](const std::vector<std::size_t>& nodes) {
      double end = host;
      for (const std::size_t n : nodes) end = std::max(end, ends[n]);
      return end;
    };
    for (int i = 0; i < 300; ++i) {
      const std::size_t s = rng() % kMaxStreams;
      const Stream stream = device.stream(static_cast<StreamId>(s));
      const std::uint64_t dice = rng() % 20;
      if (dice < 10) {
        const Cost cost{.flops = static_cast<double>(rng() % 4096),
                        .wire_bytes = static_cast<double>(rng() % 2 * 64)};
        ends.push_back(latest(due[s]) + kExactMachine.seconds(cost));
        due[s] = {ends.size() - 1};
        launch(stream, cost);
        REQUIRE(times.ends.back() == ends.back());
      } else if (dice < 14) {
        events.emplace_back(stream.record(), due[s]);
      } else if (dice < 19 && !events.empty()) {
        const auto& [event, nodes] = events[rng() % events.size()];
        stream.wait(event);
        due[s].insert(due[s].end(), nodes.begin(), nodes.end());
      } else if (!events.empty()) {
        const auto& [event, nodes] = events[rng() % events.size()];
        device.block(event);
        host = latest(nodes);
        REQUIRE(executor(device).host_seconds() == host);
      }
    }
  }
}
