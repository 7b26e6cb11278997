// The last 1,000 collectives of a rank, however many there were: who, what and when.
#include "tessera/comm/flight_recorder.hpp"

#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;

namespace {

constexpr int kCalls = 1500, kKept = 1000;

// The lines of one call each.
std::vector<std::string> calls_of(const std::string& json) {
  std::vector<std::string> calls;
  std::istringstream lines(json);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("{\"seq\": ")) calls.push_back(line);
  return calls;
}

std::int64_t value(const std::string& call, const std::string& key) {
  const std::string text = concat('"', key, "\": ");
  const std::size_t at = call.find(text);
  return at == std::string::npos ? -1 : std::stoll(call.substr(at + text.size()));
}

}  // namespace

TEST_CASE("the flight record is of the last 1,000 collectives, with who, what and when", "[comm]") {
  std::string json;
  const std::int64_t begin = monotonic_ns();
  run_local(2, {.threads = 1}, [&](World& world) {
    const auto arena = world.allocate_symmetric(4096);
    for (int i = 1; i <= kCalls; ++i) {
      const std::string unit = concat("unit ", i);
      // Odd calls gather i % 7 + 1 elements of f32 of each rank, even ones reduce as many of f64.
      Collective call{.send = arena->data(),
                      .recv = arena->data() + 2048,
                      .count = i % 7 + 1,
                      .kind = CollectiveKind::all_gather};
      if (i % 2 == 0) call.kind = CollectiveKind::reduce_scatter, call.dtype = f64;
      (i % 2 == 0 ? world.reduce() : world.gather())
          .submit(call, world.device().context().intern(unit), {});
    }
    world.device().synchronize();
    if (world.rank() == 1) json = world.flight_recorder().to_json(1, 2, "none");
  });
  const std::int64_t end = monotonic_ns();
  const std::vector<std::string> calls = calls_of(json);
  REQUIRE(calls.size() == kKept);
  const std::int64_t last = value(json, "last_submitted");
  CHECK(last >= kCalls);  // making the arena may take calls of its own
  for (int k = 0; k < kKept; ++k) {
    const std::string& call = calls[static_cast<std::size_t>(k)];
    INFO(call);
    const int i = kCalls - kKept + 1 + k;
    const bool reduces = i % 2 == 0;
    CHECK(value(call, "seq") == last - kKept + 1 + k);
    CHECK_THAT(
        call,
        Catch::Matchers::Contains(concat(
            "\"process_group\": \"", reduces ? "reduce" : "gather", "\", \"name\": \"unit ", i,
            "\", \"operation\": \"", reduces ? "reduce_scatter" : "all_gather",
            "\", \"items\": 1, \"count\": ", i % 7 + 1, ", \"dtype\": \"", reduces ? "f64" : "f32",
            "\", \"reduce\": \"sum\", \"root\": 0, \"target\": 0, ")));
    CHECK_THAT(call, Catch::Matchers::Contains("\"state\": \"done\""));
    CHECK(value(call, "bytes") == (i % 7 + 1) * (reduces ? 8 : 4));
    CHECK(begin <= value(call, "submitted_ns"));
    CHECK(value(call, "submitted_ns") <= value(call, "started_ns"));
    CHECK(value(call, "started_ns") <= value(call, "done_ns"));
    CHECK(value(call, "done_ns") <= end);
  }
}

TEST_CASE("a name that the record cuts within a character leaves it JSON", "[comm]") {
  const World world = World::emulated(0, 2, {.threads = 1});  // one rank alone records nothing
  // A record keeps 47 bytes of it.
  const std::string name = std::string(46, 'a') + "\xe2\x82\xac";
  world.control().submit({.kind = CollectiveKind::barrier}, world.device().context().intern(name),
                         {});
  world.device().synchronize();
  const auto record = nlohmann::json::parse(world.flight_recorder().to_json(0, 1, "\xff"));
  CHECK(record.at("failure") == "\xef\xbf\xbd");
  CHECK(record.at("entries").back().at("name") == std::string(46, 'a') + "\xef\xbf\xbd");
}

TEST_CASE("a record that is written while its rank goes on leaves out no call", "[comm][threads]") {
  const auto recorder = std::make_unique<FlightRecorder>();
  std::atomic<bool> ends = false;
  std::thread rank([&] {
    while (!ends) {
      FlightEntry call;
      recorder->submit(call, 0);
    }
  });
  std::size_t read = 0;
  for (int trial = 0; trial < 20; ++trial) {
    while (recorder->last_submitted() < 2 * FlightRecorder::kCapacity) std::this_thread::yield();
    const auto record = nlohmann::json::parse(recorder->to_json(0, 1, ""));
    std::uint64_t expected = record.at("last_submitted").get<std::uint64_t>() + 1;
    expected -= record.at("entries").size();
    for (const auto& call : record.at("entries")) CHECK(call.at("seq") == expected++);
    read += record.at("entries").size();
  }
  CHECK(read > 0);
  ends = true;
  rank.join();
}

TEST_CASE("a rank that shows no life is missed after 5 seconds where nobody says otherwise",
          "[comm]") {
  CHECK(WorldOptions{}.heartbeat_timeout_seconds == 5);
}
