// What CapturedStep knows of a step: whether it submits what it did before, and whether its memory
// is still its own.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/philox.hpp"
#include "tessera/detail/base/text.hpp"
#include "tessera/detail/device/captured_work.hpp"
#include "tessera/device/observer.hpp"

namespace tessera {

// Ranges of addresses, each [begin, end).
class Ranges {
 public:
  void add(const void* begin, const void* end) {
    ranges_.emplace_back(static_cast<const std::byte*>(begin), static_cast<const std::byte*>(end));
  }
  // Makes one of those that touch, so that they can be looked up.
  void merge() {
    std::ranges::sort(ranges_);
    std::size_t last = 0;
    for (std::size_t i = 1; i < ranges_.size(); ++i)
      if (ranges_[i].first <= ranges_[last].second)
        ranges_[last].second = std::max(ranges_[last].second, ranges_[i].second);
      else
        ranges_[++last] = ranges_[i];
    if (!ranges_.empty()) ranges_.resize(last + 1);
  }
  bool overlap(const void* begin, const void* end) const {
    const auto next =
        std::ranges::upper_bound(ranges_, static_cast<const std::byte*>(begin), {},
                                 &std::pair<const std::byte*, const std::byte*>::second);
    return next != ranges_.end() && next->first < end;
  }
  void clear() { ranges_.clear(); }

 private:
  std::vector<std::pair<const std::byte*, const std::byte*>> ranges_;
};

// Hears what a step submits, and what becomes of its memory between two calls.
class StepWatcher final : public Observer {
 public:
  class Inside {
   public:
    explicit Inside(StepWatcher& watcher) : watcher_(watcher) { watcher_.begin(); }
    ~Inside() { watcher_.end(); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    StepWatcher& watcher_;
  };

  // Of operations, in their order: streams, names and addresses.
  std::uint64_t fingerprint() const { return prints_.empty() ? 0 : prints_.back().first; }
  // The first operation that the step before did not submit, or not there; empty for none.
  std::string difference() const {
    for (std::size_t i = 0; i < prints_.size(); ++i)
      if (i == earlier_.size() || prints_[i].first != earlier_[i].first)
        return concat("operation ", i, ", '", prints_[i].second, "'");
    return prints_.size() == earlier_.size() ? "" : concat("operation ", prints_.size());
  }
  // What keeps the last step from being captured, empty for nothing; and whether it has kept so
  // many in a row that it is the step's own way: an engine that plans gives tables to the device,
  // too.
  const std::string& obstacle() const { return obstacle_; }
  bool is_hopeless() const { return !obstacle_.empty() && times_ >= kHopeless; }
  void forget_obstacles() { obstacle_.clear(); }
  const Cost& cost() const { return cost_; }
  // Since the end of the step some of its memory has changed hands, or a failure was ended.
  bool is_disturbed() const { return is_disturbed_; }

  void launched(StreamId stream, Tick, const Op& op) override {
    if (!is_inside_) return;
    std::uint64_t print = fingerprint();
    const auto add = [&print](std::uint64_t word) {  // one multiplication, where fnv1a takes eight
      print = (print ^ word) * 0x9e3779b97f4a7c15u;
      print ^= print >> 32;
    };
    add(fnv1a(op.name, index(stream)));
    add(std::bit_cast<std::uint64_t>(op.cost.bytes));
    cost_.flops += op.cost.flops;
    cost_.bytes += op.cost.bytes;
    cost_.wire_bytes += op.cost.wire_bytes;
    for (const Access& a : op.accesses) {
      add(reinterpret_cast<std::uintptr_t>(a.begin) + static_cast<unsigned>(a.mode));
      add(reinterpret_cast<std::uintptr_t>(a.end));
      ranges_.add(a.begin, a.end);
    }
    prints_.emplace_back(print, op.name);
  }
  void executor_launched(StreamId stream, Tick, const Op& op,
                         const CollectiveBarrier* barrier) noexcept override {
    if (!is_inside_ || !obstacle_.empty()) return;
    const std::string_view name = op.name;
    const char* const why =
        name == "copy_to_host"
            ? "the host reads a value inside the step; return the tensor and read it afterwards"
        : name == "copy_from_host"
            ? "the host gives values inside the step; make the tensor an input"
            : uncapturable(stream, barrier);
    if (why) obstacle_ = concat("captured step: '", op.name, "': ", why);
  }
  void memory(const MemoryEvent& event) override {
    using Kind = MemoryEvent::Kind;
    const bool changes_hands = event.kind == Kind::handed_out || event.kind == Kind::given_back ||
                               event.kind == Kind::released;
    if (!is_inside_ && changes_hands && ranges_.overlap(event.begin, event.end))
      is_disturbed_ = true;
  }
  void reset() override { is_disturbed_ = true; }

 private:
  void begin() {
    is_inside_ = true;
    std::swap(prints_, earlier_);
    prints_.clear();
    earlier_obstacle_ = std::exchange(obstacle_, {});
    cost_ = {};
    ranges_.clear();
  }
  void end() {
    is_inside_ = false;
    is_disturbed_ = false;
    times_ = obstacle_ == earlier_obstacle_ ? times_ + 1 : 1;
    ranges_.merge();
  }

  bool is_inside_ = false, is_disturbed_ = false;
  // Of each operation: the fingerprint up to it, and its name.
  std::vector<std::pair<std::uint64_t, const char*>> prints_, earlier_;
  static constexpr int kHopeless = 4;
  std::string obstacle_, earlier_obstacle_;
  int times_ = 0;  // runs in a row with the same obstacle
  Cost cost_;
  Ranges ranges_;
};

}  // namespace tessera
