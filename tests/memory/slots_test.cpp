#include "tessera/memory/slots.hpp"

#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/memory/helpers.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Ring {
  Device device = Device::cpu({.executor = ExecutorKind::inlined});
  std::byte memory[4 * 1024];
  SlotRing slots{device.context(), memory, 1024, 4, "slots"};
};

}  // namespace

TEST_CASE("slots lie side by side and the one given back longest ago comes next") {
  Ring r;
  CHECK(r.slots.count() == 4);
  const Slot a = r.slots.take(1000, kGather), b = r.slots.take(10, kGather),
             c = r.slots.take(1024, kGather);
  CHECK(a.data == r.memory);
  CHECK(b.data == r.memory + 1024);
  CHECK(c.data == r.memory + 2048);
  CHECK(a.bytes == 1000);
  CHECK(r.slots.taken() == 3);
  r.slots.give_back(c);
  r.slots.give_back(a);
  CHECK(r.slots.take(1, kGather).number == 3);  // never used yet
  CHECK(r.slots.take(1, kGather).number == 2);
  CHECK(r.slots.take(1, kGather).number == 0);
}

TEST_CASE("the ledger books taken slots, sizes rounded") {
  Ring r;
  const Ledger& ledger = Memory::of(r.device).ledger();
  const Slot a = r.slots.take(1000, kGather), b = r.slots.take(10, kGather);
  CHECK(ledger.live_bytes("slots") == 1024 + 256);
  r.slots.give_back(a);
  CHECK(ledger.live_bytes("slots") == 256);
  r.slots.give_back(b);
  CHECK(ledger.live_bytes("slots") == 0);
  CHECK(ledger.peak_bytes() == 1024 + 256);
}

TEST_CASE("taking a slot waits for its last use and for nothing else") {
  Ring r;
  SlotRing ring(r.device.context(), r.memory, 1024, 2, "slots");
  const Slot first = ring.take(1024, kGather), second = ring.take(1024, kGather);
  touch(r.device, kGather, *first.use);
  touch(r.device, kGather, *second.use);
  touch(r.device, kCompute, *first.use);  // compute 1: the first unit
  ring.give_back(first);
  touch(r.device, kCompute, *second.use);  // compute 2: the second unit
  CHECK(r.device.gather().clock()[kCompute] == 0);
  const Slot again = ring.take(1024, kGather);
  CHECK(again.number == first.number);
  CHECK(r.device.gather().clock()[kCompute] == 1);  // not 2: the gather runs beside the second unit
  CHECK(r.device.compute().clock()[kGather] == 0);
}

TEST_CASE("a slot given back untouched still makes its next taker wait for the use before") {
  Ring r;
  SlotRing ring(r.device.context(), r.memory, 1024, 1, "slots");
  Slot slot = ring.take(1024, kGather);
  touch(r.device, kCompute, *slot.use);
  ring.give_back(slot);
  slot = ring.take(1024, kGather);  // taken and given back without work, as after a failure
  ring.give_back(slot);
  CHECK(r.device.reduce().clock()[kCompute] == 0);
  ring.take(1024, kReduce);
  CHECK(r.device.reduce().clock()[kCompute] == 1);
}

TEST_CASE("what the host has blocked on needs no wait") {
  Ring r;
  SlotRing ring(r.device.context(), r.memory, 1024, 1, "slots");
  const Slot slot = ring.take(1024, kGather);
  touch(r.device, kCompute, *slot.use);
  r.device.synchronize();
  ring.give_back(slot);
  CHECK_NOTHROW(ring.take(1024, kGather));
  CHECK(r.device.gather().clock() == r.device.context().host_clock());
}

TEST_CASE("misuse of slots is refused with the way out") {
  Ring r;
  SlotRing ring(r.device.context(), r.memory, 1024, 1, "slots");
  CHECK_THROWS_WITH(ring.take(1025, kGather), Catch::Contains("1025") && Catch::Contains("1024"));
  CHECK_THROWS_AS(ring.take(0, kGather), ContractError);
  const Slot slot = ring.take(512, kGather);
  CHECK_THROWS_WITH(ring.take(512, kGather),
                    Catch::Contains("all 1 slots are taken") && Catch::Contains("prefetch depth"));
  ring.give_back(slot);
  CHECK_THROWS_WITH(ring.give_back(slot), Catch::Contains("slot 0 is not taken"));
  CHECK(ring.taken() == 0);
}
