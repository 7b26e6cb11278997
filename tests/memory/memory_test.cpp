// A device's memory: buffers, owners, host staging, and memory that is only counted.
#include "tessera/memory/memory.hpp"

#include <cstring>

#include "runtime/base/machine.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/memory/helpers.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::touch;

TEST_CASE("a buffer owns its block and gives it back once") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Memory& memory = Memory::of(device);
  CHECK(&memory == &Memory::of(device.context()));
  {
    Buffer a = memory.allocate(100, StreamId::compute);
    CHECK(a.bytes() == 256);
    Buffer b = std::move(a);
    CHECK_FALSE(a);  // NOLINT(bugprone-use-after-move): a moved-from buffer is empty, by contract
    CHECK(b);
    CHECK(memory.ledger().live_bytes() == 256);
    a = memory.allocate(300, StreamId::gather);
    CHECK(memory.ledger().live_bytes() == 256 + 512);
    b = std::move(a);
    CHECK(memory.ledger().live_bytes() == 512);
  }
  CHECK(memory.ledger().live_bytes() == 0);
  CHECK(memory.reserved_bytes() == 2 * kSegmentBytes);  // one segment a stream
}

TEST_CASE("buffers are booked under the innermost owner, also after they leave its scope") {
  const Device device = Device::cpu({.executor = ExecutorKind::virtual_});
  Ledger& ledger = Memory::of(device).ledger();
  Buffer kept;
  {
    const OwnerGuard outer(device, "weights");
    const Buffer a = Memory::of(device).allocate(256, StreamId::compute);
    {
      const OwnerGuard inner(device, "moments");
      kept = Memory::of(device).allocate(512, StreamId::compute);
    }
    const Buffer b = Memory::of(device).allocate(1024, StreamId::compute);
    CHECK(ledger.live_bytes("weights") == 256 + 1024);
  }
  const Buffer c = Memory::of(device).allocate(2048, StreamId::compute);
  CHECK(ledger.live_bytes("weights") == 0);
  CHECK(ledger.live_bytes("moments") == 512);
  CHECK(ledger.live_bytes("activations") == 2048);
}

TEST_CASE("meta has no memory, and owners on it mean nothing") {
  CHECK_THROWS_AS(Memory::of(Device::meta()), ContractError);
  const OwnerGuard harmless(Device::meta(), "weights");
  CHECK(Device::meta().is_meta());
}

TEST_CASE("planning counts memory that no machine has and never touches it") {
  const Device device = Device::cpu({.executor = ExecutorKind::virtual_});
  Memory& memory = Memory::of(device);
  constexpr std::int64_t kTerabytes = std::int64_t{1} << 45;
  {
    const Buffer a = memory.allocate(kTerabytes, StreamId::compute);
    const Buffer b = memory.allocate(kTerabytes, StreamId::compute);
    CHECK(reinterpret_cast<std::uintptr_t>(a.data()) >= std::uintptr_t{1} << 47);
    CHECK(a.data() + kTerabytes <= b.data());
    CHECK(memory.ledger().live_bytes() == 2 * kTerabytes);
    CHECK(memory.reserved_bytes() == 2 * kTerabytes);
  }
  CHECK(memory.ledger().peak_bytes() == 2 * kTerabytes);
  CHECK_THROWS_AS(memory.allocate(std::int64_t{1} << 50, StreamId::compute), OutOfMemory);
}

TEST_CASE("staging memory is reused only when the host knows that its readers are done",
          "[threads]") {
  const auto kind = GENERATE(ExecutorKind::threaded, ExecutorKind::inlined, ExecutorKind::virtual_);
  const Device device = Device::cpu({.executor = kind});
  Memory& memory = Memory::of(device);
  HostStaging& staging = memory.staging();
  HostStaging::Piece& first = staging.take(1000);
  CHECK(first.bytes == 1024);
  CHECK(memory.ledger().live_bytes("host staging") == 1024);
  std::memset(first.data, 1, 1000);
  HostStaging::Piece& beside = staging.take(1000);
  CHECK(&beside != &first);  // taken is taken
  staging.give_back(beside);

  touch(device, StreamId::transfer, first.use);
  staging.give_back(first);
  CHECK(memory.ledger().live_bytes("host staging") == 0);

  // The reader may be anywhere: the untouched piece is given, then a new one, but not the first.
  HostStaging::Piece& second = staging.take(1000);
  HostStaging::Piece& third = staging.take(1000);
  CHECK(&second == &beside);
  CHECK(&third != &first);
  staging.give_back(second);
  staging.give_back(third);

  device.block(device.stream(StreamId::transfer).record());
  CHECK(&staging.take(1000) == &first);
  staging.give_back(first);
}

TEST_CASE("a staged copy keeps its values while the host prepares the next", "[threads]") {
  const Device device = Device::cpu();
  HostStaging& staging = Memory::of(device).staging();
  constexpr int kRounds = 200;
  std::vector<std::int64_t> seen(kRounds);
  for (int round = 0; round < kRounds; ++round) {
    HostStaging::Piece& piece = staging.take(4096);
    auto* const words = reinterpret_cast<std::int64_t*>(piece.data);
    for (int i = 0; i < 512; ++i) words[i] = round;
    const Access accesses[] = {{&piece.use, words, words + 512, AccessMode::read}};
    std::int64_t* const out = &seen[static_cast<std::size_t>(round)];
    device.compute().launch({.name = "read", .accesses = accesses}, [words, out](Exec&) {
      for (int i = 0; i < 512; ++i) *out += words[i];
    });
    staging.give_back(piece);
    if (round % 17 == 16) device.synchronize();  // now and then all pieces are free again
  }
  device.synchronize();
  for (int round = 0; round < kRounds; ++round)
    REQUIRE(seen[static_cast<std::size_t>(round)] == 512 * round);
}

TEST_CASE("more than the machine has is OutOfMemory with the ledger, before a page is touched") {
  const std::int64_t all = physical_memory_bytes();
  REQUIRE(all > 0);
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Memory& memory = Memory::of(device);
  const OwnerGuard owner(device, "far too large");
  const Buffer small = memory.allocate(1000, StreamId::compute);
  for (const std::int64_t bytes : {all + 1, std::int64_t{1} << 45}) {
    std::string message;
    try {
      memory.allocate(bytes, StreamId::compute);
    } catch (const OutOfMemory& error) {
      message = error.what();
    }
    CHECK_THAT(message, Contains("for 'far too large'") &&
                            Contains("the machine has " + std::to_string(all)) && Contains("\n"));
  }
  CHECK(memory.reserved_bytes() == kSegmentBytes);
  CHECK(range_bytes(1) <= std::min(kRangeBytes, all));
  CHECK(range_bytes(kRangeBytes + 1) == kRangeBytes + 1);
}

TEST_CASE("the host beside a device has memory of its own, and no address of the device's") {
  for (const ExecutorKind kind : {ExecutorKind::inlined, ExecutorKind::virtual_}) {
    const Device device = Device::cpu({.executor = kind});
    Memory& memory = Memory::of(device);
    CHECK_FALSE(memory.has_host());
    Memory& host = Memory::of(device.host());
    CHECK(memory.has_host());
    CHECK(&host == &memory.host());
    CHECK(&host == &Memory::of(device.main().host()));
    const OwnerGuard on_device(device, "a"), on_host(device.host(), "b");
    const Buffer one = memory.allocate(100, StreamId::compute),
                 other = host.allocate(100, StreamId::offload);
    CHECK(one.data() != other.data());
    CHECK(memory.ledger().live_bytes("a") == 256);
    CHECK(memory.ledger().live_bytes() == 256);
    CHECK(host.ledger().live_bytes("b") == 256);
    CHECK(host.ledger().live_bytes() == 256);
    CHECK(host.reserved_bytes() == kSegmentBytes);
    CHECK(memory.reserved_bytes() == kSegmentBytes);
  }
  CHECK_THROWS_AS(Device::meta().host(), ContractError);
}
