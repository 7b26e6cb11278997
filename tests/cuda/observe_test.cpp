// What a GPU tells those who watch: when it ran each operation, and names for its profiler; and the
// options that change what it is given.
#include <vector>

#include "runtime/device/queue.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/cuda/support.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using tessera::testing::counts;
using tessera::testing::queued_gpu;

namespace {

constexpr std::int64_t kDelayNs = 3'000'000;

void launch_delay(const Stream& stream) {
  stream.launch({.name = "delay"}, [](Exec& exec) {
    if (const DriverError error = exec.driver->delay(kDelayNs, exec.native_stream))
      exec.error = error;
  });
}

// The times at which operations began and ended, as their device says.
struct Times final : Observer {
  explicit Times(DeviceContext& watched) : context(watched) {}
  void started(StreamId stream, Tick, const char*) override {
    begins.push_back(context.executor().seconds(stream));
  }
  void finished(StreamId stream, Tick, const char*) override {
    ends.push_back(context.executor().seconds(stream));
  }
  DeviceContext& context;
  std::vector<double> begins, ends;
};

}  // namespace

TEST_CASE("operations are timed by the device, and told when the host has seen their end") {
  const Device device = queued_gpu();
  Times times(device.context());
  device.context().add_observer(times);
  Executor& executor = device.context().executor();
  const double before = executor.host_seconds();
  executor.time_operations(true);
  // The executor reads both clocks in this call, one after the other: that far apart they may be.
  const double resolution = executor.host_seconds() - before;
  for (int i = 0; i < 3; ++i) launch_delay(device.compute());
  CHECK(times.begins.empty());
  device.synchronize();
  const double after = executor.host_seconds();
  REQUIRE(times.ends.size() == 3);
  CHECK(times.begins.front() >= before);
  CHECK(times.ends.back() <= after + resolution);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(times.ends[i] - times.begins[i] >= 1e-9 * kDelayNs);
    if (i > 0) CHECK(times.begins[i] >= times.ends[i - 1]);
  }

  // No longer: they are told as they are queued, and not when the host has seen their end.
  executor.time_operations(false);
  launch_delay(device.compute());
  REQUIRE(times.ends.size() == 4);
  device.synchronize();
  CHECK(times.ends.size() == 4);
  device.context().remove_observer(times);
}

TEST_CASE("a stream's waits for another are measured by the device from the first question on") {
  const Device device = queued_gpu();
  Executor& executor = device.context().executor();
  const Stream compute = device.compute(), gather = device.gather();
  const auto gathered = [&] {
    launch_delay(gather);
    compute.wait(gather.record());
    launch_delay(compute);
    device.synchronize();
  };
  gathered();
  CHECK(executor.waited_seconds(StreamId::compute) == 0);  // nobody had asked
  // Compute reaches the wait while gather is at its delay, but on a busy machine not always.
  double waited = 0;
  for (int i = 0; i < 100 && waited < 0.5e-9 * kDelayNs; ++i) {
    gathered();
    waited = executor.waited_seconds(StreamId::compute);
  }
  CHECK(waited >= 0.5e-9 * kDelayNs);
  CHECK(executor.waited_seconds(StreamId::gather) == 0);

  // A wait that nothing followed may not be over: it counts once something has.
  launch_delay(gather);
  compute.wait(gather.record());
  device.block(gather.record());
  CHECK(executor.waited_seconds(StreamId::compute) == waited);
  launch_delay(compute);
  device.synchronize();
  CHECK(executor.waited_seconds(StreamId::compute) > waited);
}

TEST_CASE("a profiler is given a range for each operation that is queued") {
  for (const bool wanted : {false, true}) {
    const auto before = counts();
    const World world =
        World::single({.device = {.kind = DeviceKind::cuda, .module = TESSERA_QUEUED_MODULE},
                       .profiler_ranges = wanted});
    launch_delay(world.device().compute());
    launch_delay(world.device().gather());
    world.device().synchronize();
    CHECK(counts().ranges - before.ranges == (wanted ? 2 : 0));
    CHECK(counts().open_ranges == before.open_ranges);
  }
}

TEST_CASE("a profiler's range of an operation that throws is closed, and the next one opens anew") {
  const auto before = counts();
  const World world =
      World::single({.device = {.kind = DeviceKind::cuda, .module = TESSERA_QUEUED_MODULE},
                     .profiler_ranges = true});
  const Device& device = world.device();
  const auto fail = [&] {
    device.compute().launch({.name = "bad"}, [](Exec& exec) { exec.error = "a shape"; });
  };
  const bool launches_on = GENERATE(true, false);
  fail();
  CHECK(counts().open_ranges == before.open_ranges + 1);
  if (launches_on) {
    launch_delay(device.compute());  // skipped, and not started
    CHECK(counts().open_ranges == before.open_ranges);
  }
  CHECK_THROWS_AS(device.synchronize(), DeviceError);
  device.context().recover();
  CHECK(counts().open_ranges == before.open_ranges);
  CHECK(counts().ranges - before.ranges == 1);

  launch_delay(device.compute());
  device.synchronize();
  CHECK(counts().ranges - before.ranges == 2);
  CHECK(counts().open_ranges == before.open_ranges);
}

TEST_CASE("products may use TF32 where the device's options say so") {
  for (const bool allowed : {false, true}) {
    const Device device = Device::cuda({.tf32 = allowed, .module = TESSERA_QUEUED_MODULE});
    const Tensor one = Tensor::ones({2, 2}, f32, device);
    CHECK(raw::matmul(one, one).to_vector<float>()[0] == (allowed ? 4.f : 2.f));
  }
}
