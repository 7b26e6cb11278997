// The race checker's shadow of memory: for every byte that was touched or announced, who touched it
// last. A map of ranges; neighbours with the same history are one cell.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/device/op.hpp"

namespace tessera::shadow {

// One tick for every lane (a stream or host of some rank); lanes that joined later count as 0.
class LaneClock {
 public:
  Tick operator[](std::size_t lane) const noexcept {
    return lane < ticks_.size() ? ticks_[lane] : 0;
  }
  void set(std::size_t lane, Tick tick) {
    if (lane >= ticks_.size()) ticks_.resize(lane + 1);
    ticks_[lane] = tick;
  }
  void merge(const LaneClock& other) {
    if (other.ticks_.size() > ticks_.size()) ticks_.resize(other.ticks_.size());
    for (std::size_t i = 0; i < other.ticks_.size(); ++i)
      if (other.ticks_[i] > ticks_[i]) ticks_[i] = other.ticks_[i];
  }
  bool covers(const LaneClock& other) const noexcept {
    for (std::size_t i = 0; i < other.ticks_.size(); ++i)
      if ((*this)[i] < other.ticks_[i]) return false;
    return true;
  }

 private:
  std::vector<Tick> ticks_;
};

struct Range {
  std::uintptr_t begin = 0, end = 0;

  Range() = default;
  Range(const void* b, const void* e)
      : begin(reinterpret_cast<std::uintptr_t>(b)), end(reinterpret_cast<std::uintptr_t>(e)) {}
  Range(std::uintptr_t b, std::uintptr_t e) : begin(b), end(e) {}
  bool operator==(const Range&) const = default;
};

// A touch: tick `tick` of a lane. An allocation ticks no stream, so it stands for all that its
// stream knew then.
struct Touch {
  std::uint32_t lane = 0;
  AccessMode mode = AccessMode::read;
  Tick tick = 0;
  const char* name = "";
  std::shared_ptr<const LaneClock> allocation;
};

// The last write of some bytes and the reads since, one for each lane.
struct Cell {
  std::uintptr_t end = 0;
  const std::string* owner = nullptr;  // null where nobody has announced the bytes
  std::uint64_t since = 0;             // when they came from the system
  bool is_free = false;
  std::vector<Touch> touches;  // the write, if any, comes first

  template <class F>
  void each(const F& f) const {
    for (const Touch& touch : touches) f(touch);
  }
  Touch last() const { return touches.empty() ? Touch{} : touches.back(); }
  // Requires: `now` was checked against the others. A write covers them all.
  void add(const Touch& now) {
    if (now.mode == AccessMode::write) {
      touches.assign(1, now);
      return;
    }
    for (Touch& touch : touches)
      if (touch.lane == now.lane && touch.mode == AccessMode::read) {
        touch = now;
        return;
      }
    touches.push_back(now);
  }
};

class ShadowMemory {
 public:
  // f(cell, bytes) for all cells in `range`, made where there are none and cut at its ends. What
  // came from the system later than `sequence` is passed over: the range's former life is over.
  template <class F>
  void visit(const Range& range, std::uint64_t sequence, const F& f) {
    auto i = cut(range.begin);
    for (std::uintptr_t at = range.begin; at < range.end; at = i++->second.end) {
      if (i == cells_.end() || i->first > at) {
        const std::uintptr_t end = i == cells_.end() ? range.end : std::min(range.end, i->first);
        i = cells_.emplace_hint(i, at, Cell{});
        i->second.end = end;
      }
      if (i->second.end > range.end) split(i, range.end);
      if (i->second.since <= sequence) f(i->second, static_cast<std::int64_t>(i->second.end - at));
    }
  }

  void acquire(const Range& range, const std::string* owner, std::uint64_t sequence) {
    Cell cell;
    cell.owner = owner;
    cell.since = sequence;
    replace(range, std::move(cell));
  }
  // Requires: `range` was visited, which has made its cells and cut them at its ends.
  void hand_out(const Range& range, const std::string* owner, const Touch& touch,
                std::uint64_t sequence) {
    if (range.begin >= range.end) return;
    auto i = cells_.find(range.begin);
    if (i->second.since > sequence) return;
    Cell& cell = i->second;
    cell.end = range.end;
    cell.owner = owner;
    cell.is_free = false;
    cell.touches.assign(1, touch);
    for (++i; i != cells_.end() && i->first < range.end;) i = cells_.erase(i);
  }
  void give_back(const Range& range, std::uint64_t sequence) {
    visit(range, sequence, [](Cell& cell, std::int64_t) { cell.is_free = true; });
  }
  void forget(const Range& range, std::uint64_t sequence) {
    cut(range.end);
    for (auto i = cut(range.begin); i != cells_.end() && i->first < range.end;)
      i = i->second.since <= sequence ? cells_.erase(i) : std::next(i);
  }
  // After a write of all of it: one cell again, unless owners differ.
  void join(const Range& range) {
    auto first = cells_.find(range.begin);
    for (auto i = std::next(first); i != cells_.end() && i->first < range.end;) {
      const Cell& a = first->second;
      const bool alike = i->second.owner == a.owner && i->second.since == a.since &&
                         i->second.is_free == a.is_free && a.end == i->first;
      if (!alike) {
        first = i++;
        continue;
      }
      first->second.end = i->second.end;
      i = cells_.erase(i);
    }
  }
  std::size_t cells() const noexcept { return cells_.size(); }

 private:
  using Cells = std::map<std::uintptr_t, Cell>;

  void split(Cells::iterator i, std::uintptr_t at) {
    Cell tail = i->second;
    i->second.end = at;
    cells_.emplace_hint(std::next(i), at, std::move(tail));
  }
  // No cell goes across `at`. The first one behind it.
  Cells::iterator cut(std::uintptr_t at) {
    const auto behind = cells_.lower_bound(at);
    if (behind == cells_.begin() || (behind != cells_.end() && behind->first == at)) return behind;
    const auto before = std::prev(behind);
    if (before->second.end <= at) return behind;
    split(before, at);
    return std::next(before);
  }
  void replace(const Range& range, Cell cell) {
    if (range.begin >= range.end) return;
    cut(range.end);
    auto i = cut(range.begin);
    if (i == cells_.end() || i->first > range.begin)
      i = cells_.emplace_hint(i, range.begin, Cell{});
    cell.end = range.end;
    i->second = std::move(cell);
    for (++i; i != cells_.end() && i->first < range.end;) i = cells_.erase(i);
  }

  Cells cells_;
};

}  // namespace tessera::shadow
