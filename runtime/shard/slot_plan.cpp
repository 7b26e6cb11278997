#include "runtime/shard/slot_plan.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "tessera/memory/offset_plan.hpp"

namespace tessera::shard {

namespace {

const UnitNeeds& needs_of(std::span<const UnitNeeds> units, int unit) {
  return units[static_cast<std::size_t>(unit)];
}

// Which units call others.
std::vector<bool> around(std::span<const UnitNeeds> units) {
  std::vector<bool> out(units.size());
  for (const UnitNeeds& unit : units)
    if (unit.parent >= 0) out[static_cast<std::size_t>(unit.parent)] = true;
  return out;
}

// As if units that close again took turns in a ring of slots, one for the unit that is open and one
// for each gather ahead of it: a gather may begin when its slot of the ring is given back. A unit
// around others is open beside them, and the root from the beginning.
void lengthen_gathers(std::span<const SlotUse> uses, std::span<const UnitNeeds> units,
                      std::vector<Interval>& intervals) {
  int depth = 1;
  for (const UnitNeeds& unit : units) depth = std::max(depth, unit.prefetch_depth);
  const std::vector<bool> is_around = around(units);
  std::vector<std::int64_t> returned(static_cast<std::size_t>(depth) + 1, 0);
  for (std::size_t i = 0; i < uses.size(); ++i) {
    const SlotUse& use = uses[i];
    const UnitNeeds& unit = needs_of(units, use.unit);
    if (use.kind != SlotKind::parameters || unit.parent < 0 || unit.keeps_open) continue;
    const auto oldest = std::min_element(returned.begin(), returned.end());
    if (*oldest > use.begin) continue;
    intervals[i].begin = *oldest;
    if (!is_around[static_cast<std::size_t>(use.unit)]) *oldest = use.end;
  }
}

// What goes at once, a piece, or all of a unit that calls others, is on the wire until two thirds
// of the largest piece of its unit, or all of it, have been queued behind it, or what is left of
// its unit and all of another; where the unit says so, until once or more as much besides. The
// matrices of an attention are that much: with all of the largest, an MLP's last would wait for the
// next unit's first.
void lengthen_buffers(std::span<const SlotUse> uses, std::span<const UnitNeeds> units,
                      std::vector<Interval>& intervals) {
  std::vector<std::size_t> pieces;  // in the order in which they are given back
  std::int64_t over = 1;
  for (std::size_t i = 0; i < uses.size(); ++i) {
    over = std::max(over, uses[i].end);
    if (uses[i].kind == SlotKind::gradients) pieces.push_back(i);
  }
  std::ranges::sort(pieces, {}, [&](std::size_t i) { return uses[i].end; });
  const std::vector<bool> is_around = around(units);
  const auto unit_of = [&](std::size_t i) { return uses[pieces[i]].unit; };
  const auto is_last = [&](std::size_t i) {  // of its unit
    return i + 1 == pieces.size() || unit_of(i + 1) != unit_of(i);
  };
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const UnitNeeds& of = needs_of(units, unit_of(i));
    const bool is_whole = is_around[static_cast<std::size_t>(unit_of(i))];
    const std::int64_t largest = *std::ranges::max_element(of.pieces),
                       most = is_whole ? std::accumulate(of.pieces.begin(), of.pieces.end(), 0ll)
                                       : largest;
    const std::int64_t enough = of.reductions_in_flight * most - (is_whole ? 0 : largest / 3);
    std::int64_t bytes = 0, others = 0;
    std::size_t last = i;
    while (is_whole && !is_last(last)) ++last;
    while (bytes < enough && others < of.reductions_in_flight && ++last < pieces.size()) {
      bytes += uses[pieces[last]].bytes;
      if (unit_of(last) != unit_of(i) && is_last(last)) ++others;
    }
    intervals[pieces[i]].end = last < pieces.size() ? uses[pieces[last]].end : over;
  }
}

}  // namespace

SlotPlan plan_slots(std::span<const SlotUse> uses, std::span<const UnitNeeds> units) {
  std::vector<Interval> intervals;
  for (const SlotUse& use : uses)
    intervals.push_back(
        {.bytes = use.bytes, .begin = use.begin, .end = use.end, .offset = use.offset});
  lengthen_gathers(uses, units, intervals);
  lengthen_buffers(uses, units, intervals);
  PlacedIntervals placed = place(intervals);
  return {std::move(placed.offsets), placed.bytes, most_alive(intervals)};
}

void join_at_turn(std::vector<SlotUse>& uses) {
  std::vector<std::int64_t> gone;  // times
  for (std::size_t i = 0; i < uses.size(); ++i) {
    while (uses[i].ends_forward && !uses[i].is_carried) {
      std::size_t next = i + 1;  // uses are in the order in which they are taken
      while (next < uses.size() && uses[next].begin < uses[i].end) ++next;
      if (next == uses.size() || uses[next].unit != uses[i].unit ||
          uses[next].kind != SlotKind::parameters)
        break;
      gone.insert(gone.end(), {uses[i].end, uses[next].begin});
      uses[i].end = uses[next].end;
      uses[i].ends_forward = uses[next].ends_forward;
      uses[i].stays += 1 + uses[next].stays;
      uses.erase(uses.begin() + static_cast<std::ptrdiff_t>(next));
    }
  }
  if (gone.empty()) return;
  std::sort(gone.begin(), gone.end());
  const auto earlier = [&](std::int64_t time) {
    return time - (std::lower_bound(gone.begin(), gone.end(), time) - gone.begin());
  };
  for (SlotUse& use : uses) use.begin = earlier(use.begin), use.end = earlier(use.end);
}

// Source: FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/
std::uint64_t fingerprint(std::span<const SlotUse> uses) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const SlotUse& use : uses)
    for (const std::int64_t word : {std::int64_t{use.unit}, static_cast<std::int64_t>(use.kind),
                                    use.begin, use.end, use.offset})
      hash = (hash ^ static_cast<std::uint64_t>(word)) * 0x100000001b3;
  return hash;
}

// --- a step without a program ---

namespace {

class AssumedStep {
 public:
  AssumedStep(std::span<const UnitNeeds> units, std::span<const AssumedCall> calls)
      : units_(units),
        calls_(calls),
        inside_(calls.size()),
        parameters_(units.size(), kNone),
        gradients_(units.size()) {
    for (std::size_t i = 1; i < calls.size(); ++i)
      inside_[static_cast<std::size_t>(calls[i].parent)].push_back(i);
    mirror(0);
  }

  std::vector<SlotUse> run() {
    forward(0);
    backward(0);
    return std::move(uses_);
  }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};

  const UnitNeeds& needs(int unit) const { return needs_of(units_, unit); }
  // The order in which backward enters calls.
  void mirror(std::size_t call) {
    order_.push_back(call);
    const std::vector<std::size_t>& inside = inside_[call];
    for (auto inner = inside.rbegin(); inner != inside.rend(); ++inner) mirror(*inner);
  }

  std::size_t take(int unit, SlotKind kind, std::int64_t bytes) {
    uses_.push_back({.unit = unit, .kind = kind, .bytes = bytes, .begin = now_++});
    return uses_.size() - 1;
  }
  void gather(int unit) {
    std::size_t& held = parameters_[static_cast<std::size_t>(unit)];
    if (held == kNone && needs(unit).gather_bytes > 0)
      held = take(unit, SlotKind::parameters, needs(unit).gather_bytes);
  }
  void close(int unit, bool ends_forward) {
    std::size_t& held = parameters_[static_cast<std::size_t>(unit)];
    if (held == kNone) return;
    uses_[held].ends_forward = ends_forward;
    uses_[std::exchange(held, kNone)].end = now_++;
  }

  void forward(std::size_t call) {
    const int unit = calls_[call].unit;
    gather(unit);
    for (const std::size_t inner : inside_[call]) forward(inner);
    if (calls_[call].is_last && !needs(unit).keeps_open) close(unit, needs(unit).may_stay);
  }
  // As BackwardOrder::enter and leave, and GradientBuffer.
  void backward(std::size_t call) {
    const int unit = calls_[call].unit;
    const std::vector<std::size_t>& inside = inside_[call];
    const std::vector<std::int64_t>& pieces = needs(unit).pieces;
    std::vector<std::size_t>& taken = gradients_[static_cast<std::size_t>(unit)];
    const auto take_pieces = [&](std::size_t count) {
      while (taken.size() < std::min(count, pieces.size()))
        taken.push_back(take(unit, SlotKind::gradients, pieces[taken.size()]));
    };
    ++entered_;
    if (call == 0) prefetch(1);
    if (calls_[call].is_read_in_backward) gather(unit);
    take_pieces(inside.empty() && calls_[call].is_first ? 1 : pieces.size());
    prefetch(needs(unit).prefetch_depth);
    for (auto inner = inside.rbegin(); inner != inside.rend(); ++inner) backward(*inner);
    if (!calls_[call].is_first) return;
    for (std::size_t sent = 0; sent < pieces.size(); ++sent) {
      uses_[taken[sent]].end = now_++;
      take_pieces(sent + 2);
    }
    taken.clear();
    close(unit, false);
  }
  void prefetch(int depth) {
    for (std::size_t i = entered_; i < order_.size() && depth > 0; ++i) {
      const AssumedCall& call = calls_[order_[i]];
      if (needs(call.unit).keeps_open || needs(call.unit).gather_bytes == 0 ||
          !call.is_read_in_backward)
        continue;
      gather(call.unit);
      --depth;
    }
  }

  std::span<const UnitNeeds> units_;
  std::span<const AssumedCall> calls_;
  std::vector<std::vector<std::size_t>> inside_;  // each call
  std::vector<SlotUse> uses_;
  std::vector<std::size_t> parameters_;              // the use that runs, of each unit
  std::vector<std::vector<std::size_t>> gradients_;  // those of its pieces
  std::vector<std::size_t> order_;
  std::size_t entered_ = 0;
  std::int64_t now_ = 0;
};

}  // namespace

std::vector<SlotUse> assumed_step(std::span<const UnitNeeds> units,
                                  std::span<const AssumedCall> calls) {
  return AssumedStep(units, calls).run();
}

}  // namespace tessera::shard
