// The race checker on small programs: what is a race, what is none, and what a report says.
#include <array>
#include <vector>

#include "runtime/device/testing.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tests/device/ranks.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::Ranks;
using enum MemoryEvent::Kind;

namespace {

constexpr AccessMode R = AccessMode::read, W = AccessMode::write;

// A device under a checker, and bytes to touch.
struct Watched {
  explicit Watched(const ExecutorChoice& executor = ExecutorKind::inlined)
      : device(Device::cpu({.executor = executor})) {
    checker->watch(device.context());
  }
  void touch(const Stream& stream, const char* name, AccessMode mode, int begin = 0, int end = 64) {
    const Access access{&use, bytes.data() + begin, bytes.data() + end, mode};
    stream.launch({.name = name, .accesses = {&access, 1}}, [](Exec&) {});
  }
  void tell(MemoryEvent::Kind kind, StreamId stream = StreamId::compute, bool to_host = false) {
    device.context().tell({.kind = kind,
                           .begin = bytes.data(),
                           .end = bytes.data() + bytes.size(),
                           .owner = "weights",
                           .stream = stream,
                           .to_host = to_host});
  }
  std::uint64_t races() const { return checker->race_count(); }
  Race only() const {
    REQUIRE(races() == 1);
    return checker->races()[0];
  }

  std::shared_ptr<RaceChecker> checker = RaceChecker::make();
  Device device;
  std::array<std::byte, 64> bytes{};
  LastUse use;
};

}  // namespace

TEST_CASE("the order of one stream is enough, on every executor", "[races]") {
  Watched w(testing::any_or_virtual());
  w.touch(w.device.compute(), "a", W);
  w.touch(w.device.compute(), "b", R);
  w.touch(w.device.compute(), "c", W);
  CHECK(w.races() == 0);
  CHECK(w.checker->summary() == "race checker: 3 operations, 0 races");
}

TEST_CASE("without an event a write races with a later read, and the report names the edge",
          "[races]") {
  Watched w(testing::any_or_virtual());
  w.tell(acquired);
  w.touch(w.device.compute(), "before", R);
  w.touch(w.device.gather(), "all_gather layers.3", W, 16, 64);
  w.touch(w.device.compute(), "matmul", R, 0, 24);
  const auto found = w.checker->races();
  REQUIRE(found.size() == 2);
  CHECK(found[0].earlier.operation == "before");
  CHECK(found[1].to_string() ==
        "race on 8 bytes of 'weights': 'matmul' on compute (rank 0, tick 2) may read while "
        "'all_gather layers.3' on gather (rank 0, tick 1) may write them; make compute wait for "
        "gather's tick 1, the end of 'all_gather layers.3'");
  CHECK(w.checker->summary() == "race checker: 3 operations, 2 races");
}

TEST_CASE("an event that is waited for orders everything before it", "[races]") {
  Watched w;
  w.touch(w.device.compute(), "write", W);
  w.device.gather().wait(w.device.compute().record());
  w.touch(w.device.gather(), "read", R);
  w.touch(w.device.gather(), "write back", W);
  CHECK(w.races() == 0);
}

TEST_CASE("an event of an earlier point does not order what came after it", "[races]") {
  Watched w;
  w.touch(w.device.compute(), "first", R);
  const Event early = w.device.compute().record();
  w.touch(w.device.compute(), "second", R);
  w.device.gather().wait(early);
  w.touch(w.device.gather(), "write", W);
  CHECK(w.only().earlier.operation == "second");
}

TEST_CASE("order passes on through other streams and through the host", "[races]") {
  Watched w;
  w.touch(w.device.compute(), "write", W);
  SECTION("a chain of events") {
    w.device.gather().wait(w.device.compute().record());
    w.device.reduce().wait(w.device.gather().record());
  }
  SECTION("the host blocks") { w.device.block(w.device.compute().record()); }
  SECTION("the host synchronizes") { w.device.synchronize(); }
  w.touch(w.device.reduce(), "read", R);
  CHECK(w.races() == 0);
}

TEST_CASE("reads do not race; a write is checked against every read", "[races]") {
  Watched w;
  w.touch(w.device.gather(), "read 1", R);
  w.touch(w.device.reduce(), "read 2", R);
  w.touch(w.device.compute(), "read 3", R);
  CHECK(w.races() == 0);
  const bool second_too = GENERATE(false, true);
  w.device.compute().wait(w.device.gather().record());
  if (second_too) w.device.compute().wait(w.device.reduce().record());
  w.touch(w.device.compute(), "write", W);
  CHECK(w.races() == (second_too ? 0 : 1));
}

TEST_CASE("the same race is told once", "[races]") {
  Watched w;
  for (int i = 0; i < 5; ++i) {
    w.touch(w.device.compute(), "write", W);
    w.touch(w.device.gather(), "read", R);
    w.device.compute().wait(w.device.gather().record());
  }
  CHECK(w.only().later.operation == "read");
}

TEST_CASE("ranges that do not overlap do not race", "[races]") {
  Watched w;
  w.touch(w.device.compute(), "left", W, 0, 32);
  w.touch(w.device.gather(), "right", W, 32, 64);
  CHECK(w.races() == 0);
  w.touch(w.device.reduce(), "middle", W, 31, 33);  // both, one byte each
  CHECK(w.races() == 2);
  CHECK(w.checker->races()[0].bytes == 1);
}

TEST_CASE("handed-out bytes are checked against every touch of their former life", "[races]") {
  Watched w;
  w.tell(acquired);
  w.tell(handed_out);
  w.device.gather().wait(w.device.compute().record());
  w.touch(w.device.gather(), "copy out", R);
  w.tell(given_back);
  const bool gated = GENERATE(false, true);
  if (gated) w.device.compute().wait(w.device.gather().record());
  w.tell(handed_out);
  CHECK(w.races() == (gated ? 0 : 1));
  if (gated) return;
  CHECK(w.only().kind == RaceKind::reuse);
  CHECK_THAT(w.only().to_string(),
             Contains("reuse of 64 bytes of 'weights': handed out on compute") &&
                 Contains("make compute wait for gather's tick 1, the end of 'copy out'"));
}

TEST_CASE("another stream waits for the allocation, also of fresh memory", "[races]") {
  Watched w;
  w.touch(w.device.compute(), "earlier work", R, 0, 0);  // the stream has reached some tick
  w.tell(acquired);
  w.tell(handed_out);
  const bool ordered = GENERATE(false, true);
  if (ordered) w.device.gather().wait(w.device.compute().record());
  w.touch(w.device.gather(), "write", W);
  CHECK(w.races() == (ordered ? 0 : 1));
  if (!ordered) CHECK_THAT(w.only().missing_edge, Contains("after the allocation"));
}

// The clocks cover a second wait of the same tick, so the executor never hears of it: no allocation
// in between may ask for it.
TEST_CASE("an event of the same tick orders what is allocated after it", "[races]") {
  Watched w;
  w.touch(w.device.compute(), "earlier work", R, 0, 0);
  w.device.gather().wait(w.device.compute().record());
  w.tell(handed_out);
  w.device.gather().wait(w.device.compute().record());
  w.touch(w.device.gather(), "write", W);
  CHECK(w.races() == 0);
}

TEST_CASE("what was given back is not used", "[races]") {
  Watched w;
  w.tell(handed_out);
  w.touch(w.device.compute(), "use", W);
  w.tell(given_back);
  w.touch(w.device.compute(), "late use", R);
  CHECK(w.only().kind == RaceKind::use_after_free);
  CHECK(w.only().later.operation == "late use");
}

TEST_CASE("bytes go back to the system when the host knows that all is over", "[races]") {
  Watched w;
  w.tell(acquired);
  w.touch(w.device.gather(), "copy", R);
  const bool blocked = GENERATE(false, true);
  if (blocked) w.device.block(w.device.gather().record());
  w.tell(released);
  CHECK(w.races() == (blocked ? 0 : 1));
  if (!blocked) CHECK_THAT(w.only().to_string(), Contains("block the host on gather's"));
  w.tell(acquired);  // no history
  w.touch(w.device.compute(), "write", W);
  CHECK(w.races() == (blocked ? 0 : 1));
}

TEST_CASE("the host's own reads and writes take part", "[races]") {
  Watched w;
  SECTION("a launch follows what the host wrote before") {
    w.device.context().host_writes(w.bytes.data(), 64);
    w.touch(w.device.gather(), "copy in", R);
    CHECK(w.races() == 0);
    w.device.context().host_writes(w.bytes.data(), 8);  // while it is read
    CHECK(w.only().missing_edge == "block the host on gather's tick 1, the end of 'copy in'");
  }
  SECTION("the host reads what a stream wrote after it has blocked") {
    w.touch(w.device.compute(), "copy out", W);
    const Event done = w.device.compute().record();
    const bool blocked = GENERATE(false, true);
    if (blocked) w.device.block(done);
    w.device.context().host_reads(w.bytes.data(), 64);
    CHECK(w.races() == (blocked ? 0 : 1));
  }
}

TEST_CASE("a wait that the executor loses is seen, though the clocks believe in it", "[races]") {
  Watched w;
  Mutator::install(w.device.context(), {Mutation::Kind::drop_wait, 1});
  w.touch(w.device.compute(), "write", W);
  w.device.gather().wait(w.device.compute().record());
  CHECK(w.device.gather().clock()[StreamId::compute] == 1);
  w.touch(w.device.gather(), "read", R);
  CHECK(w.races() == 1);
}

TEST_CASE("a collective orders all ranks, whichever comes first", "[races][threads]") {
  const ExecutorChoice executor = testing::any_executor(7);
  const bool joins = GENERATE(false, true);
  constexpr int kRanks = 3;
  const auto checker = RaceChecker::make();
  Ranks ranks(executor, kRanks);
  std::array<std::byte, 64> shared{};  // rank 0 writes it, the others read it without asking
  LastUse uses[kRanks];
  const Device owner = Device::cpu({.executor = ExecutorKind::inlined});
  checker->watch(owner.context());
  owner.context().tell({acquired, shared.data(), shared.data() + 64, "shared"});
  const auto thrown = ranks.run([&](const Device& device, int rank) {
    checker->watch(device.context());
    const Access access{&uses[rank], shared.data(), shared.data() + 64, rank == 0 ? W : R};
    // Rank 0's own collective follows its write; the others' read follows theirs.
    if (rank == 0)
      device.gather().launch({.name = "write", .accesses = {&access, 1}}, [](Exec&) {});
    device.gather().launch_collective({.name = "meet"}, joins ? &ranks.barrier : nullptr,
                                      [](Exec&) {});
    device.compute().wait(device.gather().record());
    if (rank > 0) device.compute().launch({.name = "read", .accesses = {&access, 1}}, [](Exec&) {});
  });
  for (const auto& what : thrown) CHECK(what.empty());
  CHECK((checker->race_count() == 0) == joins);
  CHECK(checker->operations() == 2 * kRanks);
  if (!joins) CHECK_THAT(checker->races()[0].missing_edge, Contains("by a collective"));
}
