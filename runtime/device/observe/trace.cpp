#include "tessera/device/observe/trace.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/json.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace {

constexpr int kHostLane = 0;
int lane(StreamId stream) { return 1 + static_cast<int>(index(stream)); }

// A counter is the user's, and its curve needs a value.
std::string number(double value) { return json::number(std::isfinite(value) ? value : 0); }

}  // namespace

// Puts the kept pieces on one time line. Times become whole nanoseconds first, so that slices which
// touch do not overlap by a rounding.
class Trace::Writer {
 public:
  Writer(const Trace& trace, double origin) : trace_(trace), origin_(origin) {
    for (std::size_t s = 0; s < kMaxStreams; ++s) {
      std::map<Tick, Times> all;
      for (const Times& t : trace.times_[s]) all.emplace(t.tick, t);
      for (const Operation& op : trace.operations_[s])  // others ran outside of what is kept
        if (const auto t = all.find(op.tick); t != all.end()) ran_[s].insert(*t);
    }
  }

  std::string write() {
    lanes();
    for (const Span& span : trace_.spans_) slice(kHostLane, span.name, span.begin, span.end, "");
    for (const Block& block : trace_.blocks_)
      if (const double end = end_of(block.event.clock); end > block.asked)
        slice(kHostLane, concat("block on ", name(block.event.stream)), block.asked, end, "");
    for (std::size_t s = 0; s < kMaxStreams; ++s) operations(static_cast<StreamId>(s));
    waits();
    for (const Counter& counter : trace_.counters_) samples(counter);
    return std::move(out_);
  }

 private:
  void lanes() {
    const auto label = [&](const char* kind, int tid, std::string_view text, int position) {
      event("M", concat(kind, "_name"), tid, "",
            concat("\"args\": {\"name\": ", json::quote(text), "}"));
      event("M", concat(kind, "_sort_index"), tid, "",
            concat("\"args\": {\"sort_index\": ", position, "}"));
    };
    label("process", kHostLane, trace_.options_.process, trace_.options_.process_id);
    label("thread", kHostLane, "host", kHostLane);
    for (std::size_t s = 0; s < kMaxStreams; ++s)
      if (const int own = lane(static_cast<StreamId>(s)); !ran_[s].empty())
        label("thread", own, kStreamNames[s], own);
  }

  void operations(StreamId stream) {
    for (const Operation& op : trace_.operations_[index(stream)]) {
      const Times* const times = find(stream, op.tick);
      if (times == nullptr) continue;  // skipped after a failure
      slice(lane(stream), op.name, times->begin, times->end,
            concat("\"tick\": ", op.tick, ", \"flops\": ", number(op.cost.flops), ", \"bytes\": ",
                   number(op.cost.bytes), ", \"wire_bytes\": ", number(op.cost.wire_bytes)));
    }
  }

  // A wait has no body, so its times follow from those around it: it begins when the host has asked
  // and the stream is free, and ends with what it waits for.
  void waits() {
    std::array<double, kMaxStreams> reached{};
    int arrow = 0;
    for (const Wait& wait : trace_.waits_) {
      const std::size_t s = index(wait.stream);
      double begin = std::max(wait.asked, reached[s]);
      if (const Times* const before = find(wait.stream, wait.after))
        begin = std::max(begin, before->end);
      const auto next = ran_[s].upper_bound(wait.after);
      double end = end_of(wait.event.clock);
      if (next != ran_[s].end()) end = std::min(end, next->second.begin);
      if (end > begin) {
        slice(lane(wait.stream), concat("wait for ", name(wait.event.stream)), begin, end,
              concat("\"tick\": ", wait.event.tick));
        reached[s] = end;
      }
      const Times* const from = find(wait.event.stream, wait.event.tick);
      if (from == nullptr || next == ran_[s].end()) continue;
      const std::string id =
          concat("\"cat\": \"wait\", \"id\": \"", trace_.options_.process_id, '.', ++arrow, "\"");
      event("s", "wait", lane(wait.event.stream), time(from->begin), id);
      event("f", "wait", lane(wait.stream), time(next->second.begin), id + ", \"bp\": \"e\"");
    }
  }

  void samples(const Counter& counter) {
    for (const auto& [tick, value] : counter.samples)
      if (const Times* const times = find(StreamId::compute, tick))
        event("C", counter.name, kHostLane, time(times->begin),
              concat("\"args\": {\"value\": ", number(value), "}"));
  }

  const Times* find(StreamId stream, Tick tick) const {
    const auto found = ran_[index(stream)].find(tick);
    return found == ran_[index(stream)].end() ? nullptr : &found->second;
  }
  double end_of(const Clock& clock) const {
    double end = 0;
    for (std::size_t s = 0; s < kMaxStreams; ++s)
      if (const Times* const times = find(static_cast<StreamId>(s), clock.ticks[s]))
        end = std::max(end, times->end);
    return end;
  }

  long long nanoseconds(double seconds) const { return std::llround((seconds - origin_) * 1e9); }
  static std::string microseconds(long long ns) {
    char text[32];
    std::snprintf(text, sizeof text, "%lld.%03lld", ns / 1000, ns % 1000);
    return text;
  }
  std::string time(double seconds) const {
    return microseconds(std::max(0ll, nanoseconds(seconds)));
  }

  void slice(int tid, std::string_view what, double begin, double end, const std::string& args) {
    event("X", what, tid, time(begin),
          concat("\"dur\": ", microseconds(nanoseconds(end) - nanoseconds(begin)), ", \"args\": {",
                 args, "}"));
  }
  void event(const char* phase, std::string_view what, int tid, const std::string& ts,
             const std::string& more) {
    if (!out_.empty()) out_ += ",\n";
    out_ += concat("{\"ph\": \"", phase, "\", \"name\": ", json::quote(what),
                   ", \"pid\": ", trace_.options_.process_id, ", \"tid\": ", tid);
    if (!ts.empty()) out_ += ", \"ts\": " + ts;
    out_ += ", " + more + "}";
  }

  const Trace& trace_;
  const double origin_;
  std::array<std::map<Tick, Times>, kMaxStreams> ran_;
  std::string out_;
};

void Trace::add_counter(std::string name, std::function<double()> value) {
  counters_.push_back({std::move(name), std::move(value), {}});
}

void Trace::begin(std::string name) {
  TESSERA_EXPECT(!keeps_, "Trace::begin: '", name, "' begins inside of '", spans_.back().name,
                 "'; call end() first");
  device_.executor().time_operations(true);
  const double now = device_.executor().host_seconds();
  spans_.push_back({std::move(name), now, now});
  keeps_ = true;
}

void Trace::end() {
  TESSERA_EXPECT(keeps_, "Trace::end: nothing has begun");
  spans_.back().end = device_.executor().host_seconds();
  device_.executor().time_operations(false);
  keeps_ = false;
}

std::string Trace::json(double origin_seconds) const {
  device_.synchronize();
  return Writer(*this, origin_seconds).write();
}

double Trace::origin_seconds() const { return spans_.empty() ? 0 : spans_.front().begin; }

// Between two operations of compute the largest value counts: a peak is not lost.
void Trace::sample(Tick next) {
  for (Counter& counter : counters_) {
    const double value = counter.value();
    auto& samples = counter.samples;
    if (!samples.empty() && samples.back().first == next)
      samples.back().second = std::max(samples.back().second, value);
    else
      samples.emplace_back(next, value);
  }
}

void Trace::launched(StreamId stream, Tick tick, const Op& op) {
  if (!keeps_) return;
  operations_[index(stream)].push_back({tick, op.name, op.cost});
  sample(stream == StreamId::compute ? tick : next_of_compute());
}

// What is handed out may be given back before anything is launched.
void Trace::memory(const MemoryEvent& event) {
  if (keeps_ && event.kind == MemoryEvent::Kind::handed_out) sample(next_of_compute());
}

Tick Trace::next_of_compute() const {
  return device_.clock(StreamId::compute)[StreamId::compute] + 1;
}

void Trace::waited(StreamId stream, const Event& event) {
  if (!keeps_) return;
  waits_.push_back(
      {stream, device_.clock(stream)[stream], event, device_.executor().host_seconds()});
}

void Trace::blocked(const Event& event) {
  if (keeps_) blocks_.push_back({event, device_.executor().host_seconds()});
}

// On the thread that runs the stream's bodies, which may be ahead of `end` or behind `begin`: what
// was not launched between them is left out when it is written.
void Trace::started(StreamId stream, Tick tick, const char*) {
  const double now = device_.executor().seconds(stream);
  times_[index(stream)].push_back({tick, now, now});
}
void Trace::finished(StreamId stream, Tick, const char*) {
  times_[index(stream)].back().end = device_.executor().seconds(stream);
}

}  // namespace tessera
