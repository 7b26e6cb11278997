// The clocks behind RaceChecker, and what they say about the shadow of memory.
//
// A lane is a stream or the host of one rank. Ranks' events are taken up in the order of their host
// programs; a rank whose next event is a collective waits, in the backlog, until all its peers are
// there (their hosts run freely, and what follows the collective here depends on what led to it
// there).
#include "tessera/device/observe/race_checker.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string_view>

#include "runtime/device/observe/race_watcher.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace {

using shadow::Entry;
using shadow::kHost;
using shadow::kLanes;
using shadow::LaneClock;
using shadow::ShadowMemory;
using shadow::Touch;
using Frozen = std::shared_ptr<const LaneClock>;

constexpr std::size_t kKeptRaces = 100;
constexpr std::size_t kSweepEvents = 4096;

struct Rank {
  int number = 0;        // in its world
  std::size_t base = 0;  // its first lane
  ShadowMemory* memory = nullptr;
  std::map<std::uint64_t, Frozen> events;  // by number; without those that the host covers
  std::deque<Entry> backlog;
};

class Checker final : public RaceChecker,
                      public shadow::Inbox,
                      public std::enable_shared_from_this<Checker> {
 public:
  void watch(DeviceContext& context) override;
  std::uint64_t operations() const override {
    const std::lock_guard lock(mutex_);
    return operations_;
  }
  std::uint64_t race_count() const override {
    const std::lock_guard lock(mutex_);
    return seen_.size();
  }
  std::vector<Race> races() const override {
    const std::lock_guard lock(mutex_);
    return races_;
  }

  // --- shadow::Inbox ---
  void submit(std::size_t rank, Entry&& entry) override;
  void end(std::size_t rank) override;
  void reset(std::size_t rank) override;

 private:
  void drain();
  bool is_ready(Rank& rank, Entry& entry);
  void leave_barriers(Rank& rank);
  void process_collective(const CollectiveBarrier* barrier);
  void process(Rank& rank, const Entry& entry);
  void enter(Rank& rank, const Entry& entry);
  void touch_all(Rank& rank, const Entry& entry);
  void record(Rank& rank, const Entry& entry);
  void block(Rank& rank, const Entry& entry);
  void change(Rank& rank, const Entry& entry);
  void release(Rank& rank, const Entry& entry);
  void hand_out(Rank& rank, const Entry& entry);
  void touch(Rank& rank, const Entry& entry, const shadow::Range& range, AccessMode mode);
  bool is_ordered(const Rank& rank, const LaneClock& clock, const Touch& earlier,
                  const shadow::Cell& cell) const;
  void report(RaceKind kind, const Touch& earlier, const Touch& later, const shadow::Cell& cell,
              std::int64_t bytes);
  RaceSide side(const Touch& touch) const;
  std::string missing_edge(RaceKind kind, const Touch& earlier, const Touch& later) const;
  Touch touch_of(const Rank& rank, const Entry& entry, AccessMode mode) const {
    const std::size_t lane = rank.base + entry.lane;
    return {static_cast<std::uint32_t>(lane), mode, lanes_[lane][lane], entry.name, nullptr};
  }
  // A snapshot of a lane, shared as long as nothing changes.
  Frozen freeze(std::size_t lane) {
    if (!frozen_[lane]) frozen_[lane] = std::make_shared<const LaneClock>(lanes_[lane]);
    return frozen_[lane];
  }
  LaneClock& change(std::size_t lane) {
    frozen_[lane] = nullptr;
    return lanes_[lane];
  }
  // The same text at the same address for ever. Most come again from where they came before.
  const std::string* intern(std::string_view text) {
    const std::string*& known =
        known_[reinterpret_cast<std::uintptr_t>(text.data()) / 8 % known_.size()];
    if (known != nullptr && *known == text) return known;
    const auto found = names_.find(text);
    return known = &*(found != names_.end() ? found : names_.emplace(text).first);
  }

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<LaneClock> lanes_;
  std::vector<Frozen> frozen_;
  ShadowMemory memory_;  // of this process
  // Of ranks that run nothing: addresses are counted.
  std::vector<std::unique_ptr<ShadowMemory>> plans_;
  std::map<const CollectiveBarrier*, std::vector<Rank*>> barriers_;  // never walked
  std::set<std::string, std::less<>> names_;
  std::array<const std::string*, 256> known_{};  // some of them
  std::set<std::string> seen_;
  std::vector<Race> races_;
  std::uint64_t operations_ = 0, sequence_ = 0;
};

// ---- Ranks and their order

void Checker::watch(DeviceContext& context) {
  const std::lock_guard lock(mutex_);
  auto rank = std::make_unique<Rank>();
  rank->number = context.rank();
  rank->base = lanes_.size();
  rank->memory = &memory_;
  if (!context.executor().runs_bodies()) {
    plans_.push_back(std::make_unique<ShadowMemory>());
    rank->memory = plans_.back().get();
  }
  lanes_.resize(rank->base + kLanes);
  frozen_.resize(rank->base + kLanes);
  for (std::size_t s = 0; s < kMaxStreams; ++s)
    lanes_[rank->base + s].set(rank->base + s, context.clock(static_cast<StreamId>(s)).ticks[s]);
  ranks_.push_back(std::move(rank));
  context.add_observer(std::make_shared<shadow::Watcher>(shared_from_this(), ranks_.size() - 1));
}

void Checker::submit(std::size_t number, Entry&& entry) {
  const std::lock_guard lock(mutex_);
  Rank& rank = *ranks_[number];
  entry.sequence = ++sequence_;
  if (entry.kind == Entry::Kind::launch) {
    ++operations_;
    entry.name = intern(entry.name)->c_str();
  }
  if (entry.kind == Entry::Kind::memory) entry.owner = intern(entry.owner_name);
  // Fresh memory has no history, whoever is late.
  if (entry.kind == Entry::Kind::memory && entry.memory == MemoryEvent::Kind::acquired)
    return rank.memory->acquire(entry.range, entry.owner, entry.sequence);
  if (rank.backlog.empty() && !entry.barrier) return process(rank, entry);
  entry.keep_accesses();
  rank.backlog.push_back(std::move(entry));
  drain();
}

void Checker::drain() {
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& rank : ranks_)
      while (!rank->backlog.empty() && is_ready(*rank, rank->backlog.front())) {
        moved = true;
        if (const CollectiveBarrier* barrier = rank->backlog.front().barrier) {
          process_collective(barrier);
        } else {
          process(*rank, rank->backlog.front());
          rank->backlog.pop_front();
        }
      }
  }
}

bool Checker::is_ready(Rank& rank, Entry& entry) {
  if (!entry.barrier) return true;
  auto& here = barriers_[entry.barrier];
  if (!std::exchange(entry.arrived, true)) here.push_back(&rank);
  return here.size() >= static_cast<std::size_t>(entry.barrier_size);
}

// A collective where a rank has met no peer counts as not run.
void Checker::leave_barriers(Rank& rank) {
  for (Entry& entry : rank.backlog) {
    if (entry.arrived) std::erase(barriers_[entry.barrier], &rank);
    entry.barrier = nullptr;
  }
}

void Checker::reset(std::size_t number) {
  const std::lock_guard lock(mutex_);
  leave_barriers(*ranks_[number]);
  drain();
}

void Checker::end(std::size_t number) {
  const std::lock_guard lock(mutex_);
  Rank& rank = *ranks_[number];
  leave_barriers(rank);
  rank.backlog.clear();
  rank.events.clear();
}

// ---- Events

// All parts begin with what all lanes knew, and all that follows knows all parts.
void Checker::process_collective(const CollectiveBarrier* barrier) {
  std::vector<Rank*> here = std::move(barriers_.at(barrier));
  barriers_.erase(barrier);
  LaneClock all;
  for (Rank* rank : here) all.merge(lanes_[rank->base + rank->backlog.front().lane]);
  for (Rank* rank : here) {
    const Entry& entry = rank->backlog.front();
    change(rank->base + entry.lane).merge(all);
    enter(*rank, entry);
    touch_all(*rank, entry);
  }
  for (Rank* rank : here) all.merge(lanes_[rank->base + rank->backlog.front().lane]);
  for (Rank* rank : here) {
    change(rank->base + rank->backlog.front().lane).merge(all);
    rank->backlog.pop_front();
  }
}

void Checker::process(Rank& rank, const Entry& entry) {
  switch (entry.kind) {
    case Entry::Kind::launch:
      enter(rank, entry);
      return touch_all(rank, entry);
    case Entry::Kind::record:
      return record(rank, entry);
    case Entry::Kind::wait:
      if (const auto found = rank.events.find(entry.number); found != rank.events.end())
        change(rank.base + entry.lane).merge(*found->second);
      return;
    case Entry::Kind::block:
      return block(rank, entry);
    case Entry::Kind::memory:
      return change(rank, entry);
  }
}

// A launch follows what its host did before.
void Checker::enter(Rank& rank, const Entry& entry) {
  const std::size_t lane = rank.base + entry.lane, host = rank.base + kHost;
  LaneClock& clock = change(lane);
  clock.set(lane, entry.tick);
  clock.set(host, lanes_[host][host]);
}

void Checker::touch_all(Rank& rank, const Entry& entry) {
  for (const Access& a : entry.given) touch(rank, entry, {a.begin, a.end}, a.mode);
  for (const auto& [range, mode] : entry.accesses) touch(rank, entry, range, mode);
}

void Checker::record(Rank& rank, const Entry& entry) {
  const std::size_t lane = rank.base + entry.lane;
  Frozen snapshot = freeze(lane);
  if (entry.tick < (*snapshot)[lane]) {  // it marks an earlier point of its stream
    LaneClock before = *snapshot;
    before.set(lane, entry.tick);
    snapshot = std::make_shared<const LaneClock>(std::move(before));
  }
  rank.events.emplace(entry.number, std::move(snapshot));
  if (rank.events.size() % kSweepEvents == 0)
    std::erase_if(rank.events, [&](const auto& event) {
      return lanes_[rank.base + kHost].covers(*event.second);
    });
}

// The host has slept until the event: so has all that it submits from here on.
void Checker::block(Rank& rank, const Entry& entry) {
  const auto found = rank.events.find(entry.number);
  if (found == rank.events.end()) return;
  const LaneClock known = *found->second;
  for (std::size_t l = 0; l < kLanes; ++l) change(rank.base + l).merge(known);
  const LaneClock& host = lanes_[rank.base + kHost];
  while (!rank.events.empty() && host.covers(*rank.events.begin()->second))
    rank.events.erase(rank.events.begin());
}

// ---- Memory

void Checker::change(Rank& rank, const Entry& entry) {
  const std::size_t lane = rank.base + entry.lane;
  if (entry.lane == kHost) {
    LaneClock& clock = change(lane);
    clock.set(lane, clock[lane] + 1);
  }
  switch (entry.memory) {
    case MemoryEvent::Kind::acquired:
    case MemoryEvent::Kind::claimed:
      return;
    case MemoryEvent::Kind::handed_out:
      return hand_out(rank, entry);
    case MemoryEvent::Kind::given_back:
      return rank.memory->give_back(entry.range, entry.sequence);
    case MemoryEvent::Kind::released:
      return release(rank, entry);
    case MemoryEvent::Kind::host_reads:
      return touch(rank, entry, entry.range, AccessMode::read);
    case MemoryEvent::Kind::host_writes:
      return touch(rank, entry, entry.range, AccessMode::write);
  }
}

void Checker::hand_out(Rank& rank, const Entry& entry) {
  const std::size_t lane = rank.base + entry.lane, host = rank.base + kHost;
  change(lane).set(host, lanes_[host][host]);  // as the launch that uses it first will
  Touch taken = touch_of(rank, entry, AccessMode::write);
  taken.allocation = freeze(lane);
  rank.memory->visit(entry.range, entry.sequence, [&](shadow::Cell& cell, std::int64_t bytes) {
    cell.each([&](const Touch& earlier) {
      if (!is_ordered(rank, lanes_[lane], earlier, cell))
        report(RaceKind::reuse, earlier, taken, cell, bytes);
    });
  });
  rank.memory->hand_out(entry.range, entry.owner, taken, entry.sequence);
}

void Checker::release(Rank& rank, const Entry& entry) {
  const std::size_t host = rank.base + kHost;
  Touch now{static_cast<std::uint32_t>(host), AccessMode::write, lanes_[host][host], "the host",
            nullptr};
  rank.memory->visit(entry.range, entry.sequence, [&](shadow::Cell& cell, std::int64_t bytes) {
    cell.each([&](const Touch& earlier) {
      if (!is_ordered(rank, lanes_[host], earlier, cell))
        report(RaceKind::early_release, earlier, now, cell, bytes);
    });
  });
  rank.memory->forget(entry.range, entry.sequence);
}

void Checker::touch(Rank& rank, const Entry& entry, const shadow::Range& range, AccessMode mode) {
  if (range.begin >= range.end) return;
  const LaneClock& clock = lanes_[rank.base + entry.lane];
  const Touch now = touch_of(rank, entry, mode);
  bool is_whole = false;  // one cell already
  rank.memory->visit(range, entry.sequence, [&](shadow::Cell& cell, std::int64_t bytes) {
    is_whole = static_cast<std::uintptr_t>(bytes) == range.end - range.begin;
    if (cell.is_free) report(RaceKind::use_after_free, cell.last(), now, cell, bytes);
    cell.each([&](const Touch& earlier) {
      if (mode == AccessMode::read && earlier.mode == AccessMode::read) return;
      if (!is_ordered(rank, clock, earlier, cell))
        report(RaceKind::conflict, earlier, now, cell, bytes);
    });
    cell.add(now);
  });
  if (mode == AccessMode::write && !is_whole) rank.memory->join(range);
}

// Memory that nobody announced may have come from another rank through the system's allocator,
// after that rank's host was done with it.
bool Checker::is_ordered(const Rank& rank, const LaneClock& clock, const Touch& earlier,
                         const shadow::Cell& cell) const {
  if (earlier.allocation) return clock.covers(*earlier.allocation);
  if (clock[earlier.lane] >= earlier.tick) return true;
  const std::size_t base = earlier.lane / kLanes * kLanes;
  return cell.owner == nullptr && base != rank.base &&
         lanes_[base + kHost][earlier.lane] >= earlier.tick;
}

// ---- Reports

RaceSide Checker::side(const Touch& touch) const {
  const std::size_t stream = touch.lane % kLanes;
  return {.operation = touch.name,
          .rank = ranks_[touch.lane / kLanes]->number,
          .stream = stream == kHost ? "host" : kStreamNames[stream],
          .tick = touch.tick,
          .mode = touch.mode};
}

std::string Checker::missing_edge(RaceKind kind, const Touch& earlier, const Touch& later) const {
  const RaceSide from = side(earlier), to = side(later);
  if (kind == RaceKind::use_after_free)
    return "give the bytes back after the last operation that uses them is submitted";
  if (earlier.lane / kLanes != later.lane / kLanes)
    return concat("order ranks ", from.rank, " and ", to.rank,
                  " by a collective; events order work within one rank only");
  const std::string point =
      earlier.allocation
          ? concat("an event that ", from.stream, " records after the allocation")
          : concat(from.stream, "'s tick ", from.tick, ", the end of '", from.operation, "'");
  if (to.stream == "host") return concat("block the host on ", point);
  return concat("make ", to.stream, " wait for ", point);
}

void Checker::report(RaceKind kind, const Touch& earlier, const Touch& later,
                     const shadow::Cell& cell, std::int64_t bytes) {
  Race race{.kind = kind,
            .earlier = side(earlier),
            .later = side(later),
            .owner = cell.owner ? *cell.owner : "",
            .bytes = bytes,
            .missing_edge = {}};
  const std::string key =
      concat(static_cast<int>(kind), '/', earlier.lane, '/', race.earlier.operation, '/',
             later.lane, '/', race.later.operation, '/', race.owner);
  if (!seen_.insert(key).second || races_.size() >= kKeptRaces) return;
  race.missing_edge = missing_edge(kind, earlier, later);
  races_.push_back(std::move(race));
}

}  // namespace

std::shared_ptr<RaceChecker> RaceChecker::make() { return std::make_shared<Checker>(); }

}  // namespace tessera
