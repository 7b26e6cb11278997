// The clocks behind the door: what launches, records, waits and blocks do to them is the same for
// every executor.
#include <algorithm>
#include <utility>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"

using namespace tessera;
using tessera::testing::any_or_virtual;

namespace {

// Writes down what it is told.
struct Notes : Observer {
  int launches = 0, records = 0, waits = 0, blocks = 0, starts = 0, ends = 0;
  void launched(StreamId, Tick, const Op&) override { ++launches; }
  void recorded(const Event&) override { ++records; }
  void waited(StreamId, const Event&) override { ++waits; }
  void blocked(const Event&) override { ++blocks; }
  void started(StreamId, Tick, const char*) override { ++starts; }
  void finished(StreamId, Tick, const char*) override { ++ends; }
};

void nothing(const Stream& stream) {
  stream.launch({.name = "nothing"}, [](Exec&) {});
}

}  // namespace

TEST_CASE("a clock merges to the later tick of each stream and covers what is not later") {
  Clock a, b;
  a[StreamId::compute] = 3;
  a[StreamId::gather] = 1;
  b[StreamId::gather] = 2;
  CHECK_FALSE(a.covers(b));
  CHECK_FALSE(b.covers(a));
  a.merge(b);
  CHECK(a[StreamId::compute] == 3);
  CHECK(a[StreamId::gather] == 2);
  CHECK(a.covers(b));
  CHECK_FALSE(b.covers(a));
}

TEST_CASE("launch ticks, record snapshots, wait merges, block teaches the host") {
  const Device device = Device::cpu({.executor = any_or_virtual()});
  for (int i = 0; i < 3; ++i) nothing(device.compute());
  nothing(device.gather());
  CHECK(device.compute().clock()[StreamId::compute] == 3);
  CHECK(device.compute().clock()[StreamId::gather] == 0);
  CHECK(device.context().launches() == 4);

  const Event event = device.compute().record();
  CHECK(event.stream == StreamId::compute);
  CHECK(event.tick == 3);
  CHECK(event.clock == device.compute().clock());

  device.gather().wait(event);
  nothing(device.gather());
  CHECK(device.gather().clock()[StreamId::compute] == 3);
  CHECK(device.gather().clock()[StreamId::gather] == 2);
  CHECK(device.context().host_clock() == Clock{});

  // The host learns the gather stream's knowledge of compute as well, and with it all that it
  // submits from now on.
  device.block(device.gather().record());
  CHECK(device.context().host_clock()[StreamId::compute] == 3);
  CHECK(device.context().host_clock()[StreamId::gather] == 2);
  CHECK(device.reduce().clock()[StreamId::gather] == 2);
}

TEST_CASE("a wait for what the stream is ordered after already is free") {
  Notes notes;
  const Device device = Device::cpu({.executor = any_or_virtual()});
  device.context().add_observer(notes);
  nothing(device.compute());
  const Event event = device.compute().record();
  device.compute().wait(event);  // its own past
  CHECK(notes.waits == 0);
  device.gather().wait(event);
  CHECK(notes.waits == 1);
  device.gather().wait(event);
  CHECK(notes.waits == 1);
  device.reduce().wait(
      device.gather().record());  // an edge to compute through gather, which has no work of its own
  CHECK(notes.waits == 2);
  device.reduce().wait(event);
  CHECK(notes.waits == 2);

  device.block(event);
  device.block(event);
  CHECK(notes.blocks == 1);
  device.stream(StreamId::replicate)
      .wait(event);  // the host knows it, so whatever it submits is later
  CHECK(notes.waits == 2);
  device.context().remove_observer(notes);
}

TEST_CASE("a second event at the same tick carries what the stream has waited for in between") {
  const Device device = Device::cpu({.executor = any_or_virtual()});
  nothing(device.gather());
  const Event before = device.gather().record();
  nothing(device.compute());
  device.gather().wait(device.compute().record());
  const Event after = device.gather().record();
  REQUIRE(before.tick == after.tick);

  device.reduce().wait(before);
  CHECK(device.reduce().clock()[StreamId::compute] == 0);
  device.reduce().wait(after);
  CHECK(device.reduce().clock()[StreamId::compute] == 1);
}

TEST_CASE("a launch stamps the last uses of its accesses, per stream") {
  const Device device = Device::cpu({.executor = any_or_virtual()});
  LastUse read, written;
  const Access accesses[] = {{.use = &read, .mode = AccessMode::read},
                             {.use = &written, .mode = AccessMode::write}};
  nothing(device.compute());
  device.compute().launch({.name = "both", .accesses = accesses}, [](Exec&) {});
  device.gather().launch({.name = "one", .accesses = {accesses, 1}}, [](Exec&) {});
  CHECK(read.touched[StreamId::compute] == 2);
  CHECK(read.touched[StreamId::gather] == 1);
  CHECK(written.touched[StreamId::compute] == 2);
  CHECK(written.touched[StreamId::gather] == 0);
}

TEST_CASE("event_covering returns the last event when it is late enough, else records one") {
  Notes notes;
  const Device device = Device::cpu({.executor = any_or_virtual()});
  device.context().add_observer(notes);
  for (int i = 0; i < 2; ++i) nothing(device.gather());
  device.gather().record();
  nothing(device.gather());
  CHECK(device.context().event_covering(StreamId::gather, 1).tick == 2);
  CHECK(device.context().event_covering(StreamId::gather, 2).tick == 2);
  CHECK(notes.records == 1);
  CHECK(device.context().event_covering(StreamId::gather, 3).tick == 3);
  CHECK(notes.records == 2);
  CHECK(device.context().event_covering(StreamId::reduce, 0).stream == StreamId::reduce);
  CHECK(notes.records == 2);
  CHECK_THROWS_AS(device.context().event_covering(StreamId::gather, 4), ContractError);
  device.synchronize();
  device.context().remove_observer(notes);
}

TEST_CASE("observers hear of the host program and of every body that runs") {
  const ExecutorChoice executor = any_or_virtual();
  Notes notes;
  {
    const Device device = Device::cpu({.executor = executor});
    device.context().add_observer(notes);
    for (int i = 0; i < 5; ++i) nothing(device.compute());
    device.gather().wait(device.compute().record());
    nothing(device.gather());
    device.synchronize();
  }
  CHECK(notes.launches == 6);
  CHECK(notes.waits == 1);
  CHECK(notes.records == 2);  // one here, one by synchronize for gather
  CHECK(notes.blocks == 2);   // compute, then gather
  CHECK(notes.starts == 6);
  CHECK(notes.ends == notes.starts);
}

TEST_CASE("synchronize leaves nothing that the host does not know") {
  const Device device = Device::cpu({.executor = any_or_virtual()});
  for (int s = 0; s < kMaxStreams; ++s) nothing(device.stream(static_cast<StreamId>(s)));
  device.synchronize();
  for (int s = 0; s < kMaxStreams; ++s)
    CHECK(device.context().host_clock().ticks[static_cast<std::size_t>(s)] == 1);
}

TEST_CASE("an event of another device is refused") {
  const Device one = Device::cpu({.executor = ExecutorKind::inlined});
  const Device other = Device::cpu({.executor = ExecutorKind::inlined, .rank = 1});
  nothing(one.compute());
  const Event event = one.compute().record();
  CHECK_THROWS_AS(other.gather().wait(event), ContractError);
  CHECK_THROWS_AS(other.block(event), ContractError);
  CHECK(other.gather().clock() == Clock{});
}

TEST_CASE("the meta device has no streams and says what to do") {
  const Device meta = Device::meta();
  CHECK(meta.is_meta());
  CHECK(meta.kind() == DeviceKind::meta);
  CHECK_FALSE(meta.runs_bodies());
  CHECK_THROWS_AS(meta.context(), ContractError);
  CHECK_THROWS_AS(meta.compute(), ContractError);
  CHECK_THROWS_WITH(meta.synchronize(), Catch::Contains("materialize"));
}
