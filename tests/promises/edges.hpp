// What an executor did, as a list, and a way through it: used to explain why an edge that was
// removed is not missed.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/device/device.hpp"

namespace tessera::testing {

struct TraceEntry {
  enum class Kind { launch, record, wait, block, memory } kind;
  StreamId stream = StreamId::compute;
  Tick tick = 0;
  std::string name;  // of an operation; the owner of memory
  Event event;
  MemoryEvent::Kind memory = MemoryEvent::Kind::acquired;
  std::vector<Access> accesses;  // of a launch, of the host; hand-outs write
  bool by_host = false;
  bool is_collective = false;
};

class ExecutorTrace final : public Observer {
 public:
  using Kind = TraceEntry::Kind;
  void executor_launched(StreamId stream, Tick tick, const Op& op,
                         const CollectiveBarrier* barrier) noexcept override {
    entries.push_back({.kind = Kind::launch,
                       .stream = stream,
                       .tick = tick,
                       .name = op.name,
                       .event = {},
                       .accesses = {op.accesses.begin(), op.accesses.end()},
                       .is_collective = barrier != nullptr});
  }
  void executor_recorded(const Event& event) noexcept override {
    add(Kind::record, event.stream, event);
  }
  void executor_waited(StreamId stream, const Event& event) noexcept override {
    add(Kind::wait, stream, event);
  }
  void executor_blocked(const Event& event) noexcept override {
    add(Kind::block, event.stream, event);
  }
  void memory(const MemoryEvent& event) override {
    TraceEntry entry{.kind = Kind::memory,
                     .stream = event.stream,
                     .name = std::string(event.owner),
                     .event = {},
                     .memory = event.kind,
                     .accesses = {}};
    using Kind = MemoryEvent::Kind;
    entry.by_host = event.kind == Kind::host_reads || event.kind == Kind::host_writes ||
                    (event.kind == Kind::handed_out && event.to_host);
    if (entry.by_host || event.kind == Kind::handed_out)
      entry.accesses = {{nullptr, event.begin, event.end,
                         event.kind == Kind::host_reads ? AccessMode::read : AccessMode::write}};
    entries.push_back(std::move(entry));
  }

  std::vector<TraceEntry> entries;

 private:
  void add(Kind kind, StreamId stream, const Event& event) {
    entries.push_back({.kind = kind,
                       .stream = stream,
                       .tick = event.tick,
                       .name = {},
                       .event = event,
                       .accesses = {}});
  }
};

inline bool conflicts(const TraceEntry& a, const TraceEntry& b) {
  for (const Access& x : a.accesses)
    for (const Access& y : b.accesses)
      if (x.begin < y.end && y.begin < x.end &&
          (x.mode == AccessMode::write || y.mode == AccessMode::write))
        return true;
  return false;
}

inline std::size_t find_launch(const std::vector<TraceEntry>& entries, StreamId stream, Tick tick) {
  for (std::size_t i = 0; i < entries.size(); ++i)
    if (entries[i].kind == TraceEntry::Kind::launch && entries[i].stream == stream &&
        entries[i].tick == tick)
      return i;
  return entries.size();
}

// The edges that lead from the operation entries[from] to entries[to], in words; nothing where none
// do. A plain walk: a stream is reached when an event that follows the start has been waited for,
// or by a collective that no peer begins before it has ended one that follows the start. `peer` is
// what peers do, whose edges are all there; null for none.
inline std::optional<std::string> path(const std::vector<TraceEntry>& entries, std::size_t from,
                                       std::size_t to, const std::vector<TraceEntry>* peer) {
  using Kind = TraceEntry::Kind;
  const TraceEntry& start = entries[from];
  std::array<std::optional<std::string>, kMaxStreams> reached;
  std::optional<std::string> host;
  std::map<std::uint64_t, std::string> events;
  const TraceEntry* collective = start.is_collective ? &start : nullptr;  // the first one there
  reached[index(start.stream)] =
      concat("'", start.name, "' on ", name(start.stream), "@", start.tick);
  for (std::size_t i = from + 1; i < to; ++i) {
    const TraceEntry& e = entries[i];
    const auto& here = reached[index(e.event.stream)];
    if (e.kind == Kind::record && here && (e.stream != start.stream || e.event.tick >= start.tick))
      events[e.event.number] = concat(*here, " -> event ", name(e.stream), "@", e.event.tick);
    if (e.is_collective && !collective && e.stream == start.stream) collective = &e;
    if (e.is_collective && collective && peer && !reached[index(e.stream)])
      if (const auto way = path(*peer, find_launch(*peer, collective->stream, collective->tick),
                                find_launch(*peer, e.stream, e.tick), nullptr))
        reached[index(e.stream)] = concat("on a peer: ", *way);
    const auto found = events.find(e.event.number);
    if (e.kind == Kind::launch || found == events.end()) continue;
    if (e.kind == Kind::wait && !reached[index(e.stream)])
      reached[index(e.stream)] = concat(found->second, " -> ", name(e.stream));
    if (e.kind == Kind::block) {
      if (!host) host = concat(found->second, " -> host");
      for (auto& stream : reached)
        if (!stream) stream = host;
    }
  }
  const auto& end = entries[to].by_host ? host : reached[index(entries[to].stream)];
  if (!end) return std::nullopt;
  return concat(*end, " -> '", entries[to].name, "'");
}

// Why nobody misses entries[edge] of the run without mutation, a wait of a stream or of the host.
// The operation before it that is last, of those that conflict with what is behind it, and the
// first of these; then what orders the two in `mutant`, which is of one rank of several. A wait
// that has no such pair has ordered nothing if whatever is before it, on any stream, and conflicts
// with something behind it is ordered in `mutant`, too. Nothing where no path is found.
inline std::optional<std::string> implied(const std::vector<TraceEntry>& entries, std::size_t edge,
                                          const std::vector<TraceEntry>& mutant) {
  using Kind = TraceEntry::Kind;
  const TraceEntry& wait = entries[edge];
  const bool of_host = wait.kind == Kind::block;
  for (Tick tick = wait.event.tick; tick > 0; --tick) {
    const std::size_t from = find_launch(entries, wait.event.stream, tick);
    if (from == entries.size()) break;  // before the trace
    const std::size_t start = find_launch(mutant, wait.event.stream, tick);
    for (std::size_t to = start; of_host && to < mutant.size(); ++to)
      if (mutant[to].by_host && conflicts(mutant[start], mutant[to]))
        return path(mutant, start, to, &entries);
    for (std::size_t to = edge + 1; to < entries.size(); ++to) {
      const TraceEntry& user = entries[to];
      const bool waits = of_host ? user.stream != wait.event.stream : user.stream == wait.stream;
      if (user.kind == Kind::launch && waits && conflicts(entries[from], user))
        return path(mutant, start, find_launch(mutant, user.stream, user.tick), &entries);
    }
  }
  if (of_host) return "nothing behind it touches what was used before it";
  for (std::size_t from = 0; from < edge; ++from) {
    const TraceEntry& maker = entries[from];
    if (maker.kind != Kind::launch || maker.tick > wait.event.clock.ticks[index(maker.stream)])
      continue;
    const std::size_t start = find_launch(mutant, maker.stream, maker.tick);
    for (std::size_t to = edge + 1; to < entries.size(); ++to) {
      const TraceEntry& user = entries[to];
      if (user.kind == Kind::launch && user.stream != maker.stream && conflicts(maker, user) &&
          !path(mutant, start, find_launch(mutant, user.stream, user.tick), &entries))
        return std::nullopt;
    }
  }
  return concat("no operation of ", name(wait.event.stream), " has used what ", name(wait.stream),
                " uses behind it");
}

}  // namespace tessera::testing
