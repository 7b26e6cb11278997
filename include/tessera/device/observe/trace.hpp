// A timeline of what a device did, or of what a plan says it will do. It is an observer that keeps
// every operation with its times. It writes them as the JSON that ui.perfetto.dev and
// chrome://tracing read ("Trace Event Format", Google 2016).
//
//   host     │ step 1                                  │
//   compute  │ pack │╌╌ wait ╌╌│ matmul │ ...              one lane a stream
//   gather   │ all_gather ────▶│                          an arrow from what was recorded to the
//   memory   ▁▁▂▂▃▃▅▅▅▅▅▃▃▂                               first operation after the wait
//
// Real executors give times of the clock, and `virtual` those of its cost model; lanes and names
// are the same. A counter is sampled as the host submits, and drawn where the compute stream gets
// there. So it shows the program's memory, which does not depend on how far the host runs ahead.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "tessera/device/device.hpp"

namespace tessera {

struct TraceOptions {
  std::string process;  // the group of its lanes, as "rank 0"
  int process_id = 0;   // orders processes; distinct within a file
};

//   auto trace = std::make_shared<Trace>(device.context(), TraceOptions{.process = "rank 0"});
//   device.context().add_observer(trace);
//   trace->begin("step 1"); ... trace->end();
//   std::string events = trace->json(trace->origin_seconds());
//   device.context().remove_observer(*trace);
//
// Ordered: it hears of operations as they are launched, and keeps those between `begin` and `end`.
// Threads: begin, end and json on the host thread of the device.
class Trace final : public Observer {
 public:
  // Traces a device, which outlives it.
  Trace(DeviceContext& device, TraceOptions options)
      : device_(device), options_(std::move(options)) {}

  // Adds a counter, whose `value` is asked at every launch.
  void add_counter(std::string name, std::function<double()> value);

  // Keeps the work submitted from here to `end`, under `name` on the host's lane.
  void begin(std::string name);
  void end();

  // All kept work, as events of the format separated by ",\n". The host blocks until the device is
  // idle. Times are microseconds since `origin_seconds` on the executor's clock.
  std::string json(double origin_seconds) const;
  // When the first kept span began.
  double origin_seconds() const;

  // --- Observer ---
  void launched(StreamId stream, Tick tick, const Op& op) override;
  void waited(StreamId stream, const Event& event) override;
  void blocked(const Event& event) override;
  void memory(const MemoryEvent& event) override;
  void started(StreamId stream, Tick tick, const char* name) override;
  void finished(StreamId stream, Tick tick, const char* name) override;

 private:
  struct Operation {
    Tick tick;
    const char* name;
    Cost cost;
  };
  struct Times {  // in seconds
    Tick tick;
    double begin, end;
  };
  struct Wait {
    StreamId stream;
    Tick after;  // the last operation of `stream` before it
    Event event;
    double asked;  // by the host
  };
  struct Block {
    Event event;
    double asked;
  };
  struct Span {
    std::string name;
    double begin, end;
  };
  struct Counter {
    std::string name;
    std::function<double()> value;
    std::vector<std::pair<Tick, double>> samples;  // as an operation of compute begins
  };
  class Writer;

  void sample(Tick next);
  Tick next_of_compute() const;

  DeviceContext& device_;
  TraceOptions options_;
  bool keeps_ = false;
  std::vector<Span> spans_;
  std::array<std::vector<Operation>, kMaxStreams> operations_;  // written by the host
  std::array<std::vector<Times>, kMaxStreams> times_;  // each by what runs the stream's bodies
  std::vector<Wait> waits_;
  std::vector<Block> blocks_;
  std::vector<Counter> counters_;
};

}  // namespace tessera
