// The timeline: a small program on the virtual clock, whose times are known, and the same program
// on a real executor, which must leave the same lanes, operations and arrows.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/device/observe/trace.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using nlohmann::json;

namespace {

constexpr CostModel kMachine{.flops_per_second = 1e6,
                             .launch_seconds = 1e-6,
                             .wire_latency_seconds = 5e-6,
                             .wire_bytes_per_second = 1e6};

void launch(const Stream& stream, const char* name, const Cost& cost = {}) {
  stream.launch({.name = name, .cost = cost}, [](Exec&) {});
}

// compute  before │ a │╌ wait ╌│ b │╌ wait ╌│ c │
// gather          │ g ─────────▲ │ h ────────▲
void program(const Device& device) {
  launch(device.gather(), "g", {.wire_bytes = 5});   // 0 to 10 us
  launch(device.compute(), "a", {.flops = 3});       // 0 to 4
  device.compute().wait(device.gather().record());   // 4 to 10
  launch(device.compute(), "b\"\\");                 // 10 to 11
  launch(device.gather(), "h", {.wire_bytes = 15});  // 10 to 30
  device.compute().wait(device.gather().record());   // 11 to 30
  launch(device.compute(), "c", {.flops = 1});       // 30 to 32
  device.block(device.compute().record());
}

json traced(const CpuOptions& options) {
  const Device device = Device::cpu(options);
  double memory = 1;
  launch(device.compute(), "untold");
  device.synchronize();
  const auto owned =
      std::make_shared<Trace>(device.context(), TraceOptions{.process = "rank 0", .process_id = 7});
  device.context().add_observer(owned);
  Trace& trace = *owned;
  trace.add_counter("memory", [&] { return memory *= 2; });
  trace.begin("step 1");
  program(device);
  trace.end();
  launch(device.compute(), "untold");
  return json::parse("[" + trace.json(trace.origin_seconds()) + "]");
}

std::vector<json> all(const json& events, const std::string& phase, int lane = -1) {
  std::vector<json> out;
  for (const json& e : events)
    if (e["ph"] == phase && (lane < 0 || e["tid"] == lane)) out.push_back(e);
  return out;
}
// "name begin end", of a lane's operations and waits.
std::vector<std::string> slices(const json& events, int lane) {
  std::vector<std::string> out;
  for (const json& e : all(events, "X", lane))
    out.push_back(concat(e["name"].get<std::string>(), ' ', e["ts"].get<double>(), ' ',
                         e["ts"].get<double>() + e["dur"].get<double>()));
  return out;
}

constexpr int kHost = 0, kCompute = 1, kGather = 2;

}  // namespace

TEST_CASE("a plan's timeline has the times of the cost model") {
  const json events = traced({.executor = ExecutorKind::virtual_, .cost = kMachine});
  CHECK(slices(events, kHost) == std::vector<std::string>{"step 1 0 32", "block on compute 0 32"});
  CHECK(slices(events, kCompute) == std::vector<std::string>{"a 0 4", "b\"\\ 10 11", "c 30 32",
                                                             "wait for gather 4 10",
                                                             "wait for gather 11 30"});
  CHECK(slices(events, kGather) == std::vector<std::string>{"g 0 10", "h 10 30"});
  const json a = all(events, "X", kCompute)[0];
  CHECK(a["args"] == json::parse(R"({"tick": 2, "flops": 3, "bytes": 0, "wire_bytes": 0})"));
  for (const json& e : events) CHECK(e["pid"] == 7);
}

TEST_CASE("arrows lead from what was recorded to the first operation after the wait", "[threads]") {
  const auto kind = GENERATE(ExecutorKind::virtual_, ExecutorKind::threaded, ExecutorKind::inlined);
  CpuOptions options{.executor = kind};
  if (kind == ExecutorKind::virtual_) options.cost = kMachine;
  const json events = traced(options);
  const auto starts = all(events, "s"), ends = all(events, "f");
  REQUIRE(starts.size() == 2);
  REQUIRE(ends.size() == 2);
  const char* const from[] = {"g", "h"};
  const char* const to[] = {"b\"\\", "c"};
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(starts[i]["id"] == ends[i]["id"]);
    CHECK(starts[i]["tid"] == kGather);
    CHECK(ends[i]["tid"] == kCompute);
    for (const json& e : all(events, "X")) {
      if (e["name"] == from[i]) CHECK(e["ts"] == starts[i]["ts"]);
      if (e["name"] == to[i]) CHECK(e["ts"] == ends[i]["ts"]);
    }
  }
  CHECK(starts[0]["id"] != starts[1]["id"]);
}

TEST_CASE("a run and its plan have the same lanes, operations and counters", "[threads]") {
  const json plan = traced({.executor = ExecutorKind::virtual_, .cost = kMachine});
  const json run = traced({.executor = ExecutorKind::threaded});
  CHECK(all(plan, "M") == all(run, "M"));
  for (const int lane : {kCompute, kGather}) {
    std::vector<json> names[2];
    for (const json* events : {&plan, &run})
      for (const json& e : all(*events, "X", lane))
        if (e["args"].contains("flops")) names[events == &run].push_back({e["name"], e["args"]});
    CHECK(names[0] == names[1]);
    CHECK(names[0].size() == (lane == kCompute ? 3u : 2u));
  }
  // Sampled at g and a (the larger counts), then at b, at h and c.
  std::vector<double> values[2];
  for (const json* events : {&plan, &run})
    for (const json& e : all(*events, "C")) values[events == &run].push_back(e["args"]["value"]);
  CHECK(values[0] == std::vector<double>{4, 8, 32});
  CHECK(values[1] == values[0]);
  // On a lane nothing overlaps.
  for (const json* events : {&plan, &run})
    for (const int lane : {kCompute, kGather}) {
      auto line = all(*events, "X", lane);
      std::sort(line.begin(), line.end(), [](const json& x, const json& y) {
        return std::pair(x["ts"].get<double>(), x["dur"].get<double>()) <
               std::pair(y["ts"].get<double>(), y["dur"].get<double>());
      });
      for (std::size_t i = 1; i < line.size(); ++i)
        CHECK(line[i - 1]["ts"].get<double>() + line[i - 1]["dur"].get<double>() <=
              line[i]["ts"].get<double>() + 1e-6);
    }
}

TEST_CASE("a trace that does not begin does not end, and spans do not nest") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Trace trace(device.context(), {.process = "rank 0"});
  CHECK_THROWS_AS(trace.end(), ContractError);
  trace.begin("one");
  CHECK_THROWS_AS(trace.begin("two"), ContractError);
}
