// What a step on the virtual clock did, and the least time in which it could have been done.
//
// The computed minimum of a step. Fix what must be done: the operations of each stream in their
// order, each as long as the cost model says, and that an operation begins after those that wrote
// what it reads (found from the bytes that operations declare, not from the engine's waits). Let
// everything else go: any number of slots, any prefetch depth, waits that the engine could leave
// out. The earliest end of such a program is the longest path through it,
//
//   begin(op) = max(end of the operation before it on its stream, ends of the writers of its reads)
//
// and no engine that does the same work on the same streams is faster. With cheap communication
// the path is: gathers up to the first block, all compute, the last reductions, the optimizer; with
// dear communication it runs along the wires.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/device/device_context.hpp"

namespace tessera::testing {

struct Range {
  std::uintptr_t begin, end;
  bool overlaps(const Range& o) const { return begin < o.end && o.begin < end; }
};
inline bool overlap(const std::vector<Range>& a, const std::vector<Range>& b) {
  return std::any_of(a.begin(), a.end(), [&](const Range& r) {
    return std::any_of(b.begin(), b.end(), [&](const Range& q) { return r.overlaps(q); });
  });
}

struct Operation {
  StreamId stream;
  std::string name;
  double seconds = 0, begin = 0, end = 0;
  std::vector<Range> reads, writes;
  bool is(std::string_view kind) const { return name.find(kind) != std::string::npos; }
};

// Every operation of a step, in the order of the host program.
struct Recorder final : Observer {
  Recorder(const Device& d, const CostModel& c) : device(d), cost(c) {
    device.context().add_observer(*this);
  }
  ~Recorder() override { device.context().remove_observer(*this); }
  void launched(StreamId stream, Tick, const Op& op) override {
    Operation& o = operations.emplace_back();
    o.stream = stream;
    o.name = op.name;
    o.seconds = cost.seconds(op.cost);
    for (const Access& a : op.accesses) {
      const Range range{reinterpret_cast<std::uintptr_t>(a.begin),
                        reinterpret_cast<std::uintptr_t>(a.end)};
      (a.mode == AccessMode::read ? o.reads : o.writes).push_back(range);
    }
  }
  void started(StreamId s, Tick, const char*) override {
    operations.back().begin = device.context().executor().seconds(s);
  }
  void finished(StreamId s, Tick, const char*) override {
    operations.back().end = device.context().executor().seconds(s);
  }
  Device device;
  CostModel cost;
  std::vector<Operation> operations;
};

// When bytes were last written, and last read since.
class Bytes {
 public:
  struct Times {
    double written = 0, read = 0;
  };
  // f(times) for every piece of `range`.
  template <class F>
  void each(const Range& range, const F& f) {
    split(range.begin);
    split(range.end);
    for (auto i = pieces_.find(range.begin); i->first < range.end; ++i) f(i->second);
  }

 private:
  void split(std::uintptr_t at) { pieces_.emplace(at, std::prev(pieces_.upper_bound(at))->second); }
  std::map<std::uintptr_t, Times> pieces_{{0, {}}};  // each up to the next
};

// as_planned: an operation also begins after those that read or wrote the bytes that it writes.
enum class MemoryIs : std::uint8_t { unlimited, as_planned };

inline double longest_path(const std::vector<Operation>& operations, MemoryIs memory) {
  std::array<double, kMaxStreams> free{};
  Bytes bytes;
  for (const Operation& op : operations) {
    double begin = free[index(op.stream)];
    for (const Range& read : op.reads)
      bytes.each(read, [&](Bytes::Times& t) { begin = std::max(begin, t.written); });
    if (memory == MemoryIs::as_planned)
      for (const Range& write : op.writes)
        bytes.each(write, [&](Bytes::Times& t) { begin = std::max({begin, t.written, t.read}); });
    const double end = free[index(op.stream)] = begin + op.seconds;
    for (const Range& read : op.reads)
      bytes.each(read, [&](Bytes::Times& t) { t.read = std::max(t.read, end); });
    for (const Range& write : op.writes)
      bytes.each(write, [&](Bytes::Times& t) { t = {.written = end}; });
  }
  return *std::max_element(free.begin(), free.end());
}

}  // namespace tessera::testing
