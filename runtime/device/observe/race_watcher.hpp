// What the race checker hears of one device: every call of its observer as an entry that can wait
// for its turn.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/device/observe/shadow.hpp"
#include "tessera/detail/device/collective_barrier.hpp"
#include "tessera/device/observer.hpp"

namespace tessera::shadow {

inline constexpr std::size_t kHost = kMaxStreams;  // a rank's last lane
inline constexpr std::size_t kLanes = kMaxStreams + 1;

// One call of an observer, kept until its turn.
struct Entry {
  enum class Kind : std::uint8_t { launch, record, wait, block, memory } kind = Kind::launch;
  MemoryEvent::Kind memory = MemoryEvent::Kind::acquired;
  AccessMode mode = AccessMode::read;
  bool arrived = false;  // at its barrier
  std::size_t lane = 0;  // within the rank
  Tick tick = 0;
  std::uint64_t number = 0;  // of an event
  std::uint64_t sequence = 0;
  const char* name = "";
  const CollectiveBarrier* barrier = nullptr;
  int barrier_size = 0;
  Range range;
  std::string_view owner_name{};  // while it is being submitted
  const std::string* owner = nullptr;
  std::span<const Access> given{};                     // of a launch, while it is being submitted,
  std::vector<std::pair<Range, AccessMode>> accesses;  // and when it is kept

  void keep_accesses() {
    accesses.reserve(given.size());
    for (const Access& a : given) accesses.push_back({{a.begin, a.end}, a.mode});
    given = {};
  }
};

// Where the entries of all ranks go.  Threads: the ranks' host threads.
class Inbox {
 public:
  virtual ~Inbox() = default;
  virtual void submit(std::size_t rank, Entry&& entry) = 0;
  virtual void reset(std::size_t rank) = 0;
  virtual void end(std::size_t rank) = 0;
};

// What one device tells, with the rank that it is.
class Watcher final : public Observer {
 public:
  Watcher(std::shared_ptr<Inbox> inbox, std::size_t rank) : inbox_(std::move(inbox)), rank_(rank) {}

  void executor_launched(StreamId stream, Tick tick, const Op& op,
                         const CollectiveBarrier* barrier) noexcept override {
    Entry entry = of(Entry::Kind::launch, stream);
    entry.tick = tick;
    entry.name = op.name;
    entry.barrier = barrier;
    entry.barrier_size = barrier ? barrier->size() : 0;
    entry.given = op.accesses;
    inbox_->submit(rank_, std::move(entry));
  }
  void executor_recorded(const Event& event) noexcept override {
    tell(Entry::Kind::record, event.stream, event);
  }
  void executor_waited(StreamId stream, const Event& event) noexcept override {
    tell(Entry::Kind::wait, stream, event);
  }
  void executor_blocked(const Event& event) noexcept override {
    tell(Entry::Kind::block, event.stream, event);
  }

  void memory(const MemoryEvent& event) override {
    if (event.kind == MemoryEvent::Kind::claimed) return;
    Entry entry = of(Entry::Kind::memory, event.stream);
    entry.memory = event.kind;
    entry.range = {event.begin, event.end};
    const bool by_host = event.to_host || event.kind == MemoryEvent::Kind::host_reads ||
                         event.kind == MemoryEvent::Kind::host_writes;
    if (by_host) entry.lane = kHost;
    entry.name =
        by_host && event.kind != MemoryEvent::Kind::handed_out ? "the host" : "the allocation";
    entry.owner_name = event.owner;
    inbox_->submit(rank_, std::move(entry));
  }
  void reset() override { inbox_->reset(rank_); }
  void ended() override { inbox_->end(rank_); }

 private:
  static Entry of(Entry::Kind kind, StreamId stream) {
    Entry entry;
    entry.kind = kind;
    entry.lane = index(stream);
    return entry;
  }
  void tell(Entry::Kind kind, StreamId stream, const Event& event) {
    Entry entry = of(kind, stream);
    entry.number = event.number;
    entry.tick = event.tick;
    inbox_->submit(rank_, std::move(entry));
  }

  std::shared_ptr<Inbox> inbox_;
  std::size_t rank_;
};

}  // namespace tessera::shadow
