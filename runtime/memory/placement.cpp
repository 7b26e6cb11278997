#include "tessera/memory/placement.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include "tessera/base/checked.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera {

std::int64_t smallest_gap(std::vector<AddressRange>& taken, std::int64_t bytes,
                          std::int64_t limit) {
  std::sort(taken.begin(), taken.end(),
            [](const AddressRange& a, const AddressRange& b) { return a.begin < b.begin; });
  std::int64_t best = -1, best_size = 0, at = 0;
  const auto consider = [&](std::int64_t end) {
    const std::int64_t size = end - at;
    if (size >= bytes && (best < 0 || size < best_size)) best = at, best_size = size;
  };
  for (const AddressRange& range : taken) {
    consider(range.begin);
    at = std::max(at, range.end);
  }
  consider(limit);
  return best;
}

namespace {

std::int64_t rounded_up(std::int64_t bytes) { return round_up(bytes, kAlignmentBytes); }

PlacedIntervals place_in(const std::vector<std::size_t>& order,
                         std::span<const Interval> intervals) {
  constexpr std::int64_t kNoLimit = std::int64_t{1} << 60;
  PlacedIntervals out;
  out.offsets.assign(intervals.size(), 0);
  std::vector<std::size_t> placed;
  std::vector<AddressRange> met;
  for (std::size_t i = 0; i < intervals.size(); ++i)
    if (intervals[i].offset >= 0) {
      out.offsets[i] = intervals[i].offset;
      out.bytes = std::max(out.bytes, intervals[i].offset + rounded_up(intervals[i].bytes));
      placed.push_back(i);
    }
  for (const std::size_t i : order) {
    const Interval& one = intervals[i];
    if (one.offset >= 0) continue;
    met.clear();
    for (const std::size_t k : placed)
      if (intervals[k].begin < one.end && one.begin < intervals[k].end)
        met.push_back({out.offsets[k], out.offsets[k] + rounded_up(intervals[k].bytes)});
    out.offsets[i] = smallest_gap(met, rounded_up(one.bytes), kNoLimit);
    out.bytes = std::max(out.bytes, out.offsets[i] + rounded_up(one.bytes));
    placed.push_back(i);
  }
  return out;
}

}  // namespace

PlacedIntervals place(std::span<const Interval> intervals) {
  using Less = bool (*)(const Interval&, const Interval&);
  constexpr Less kOrders[] = {
      [](const Interval& a, const Interval& b) { return a.bytes > b.bytes; },
      [](const Interval& a, const Interval& b) { return a.begin < b.begin; },
      [](const Interval& a, const Interval& b) { return a.end - a.begin > b.end - b.begin; },
      [](const Interval& a, const Interval& b) {
        return static_cast<double>(a.bytes) * static_cast<double>(a.end - a.begin) >
               static_cast<double>(b.bytes) * static_cast<double>(b.end - b.begin);
      },
  };
  // What lies highest is placed earlier the next time. A try compares all pairs.
  const auto n = static_cast<std::int64_t>(intervals.size());
  const std::int64_t tries =
      std::clamp<std::int64_t>(100'000'000 / std::max<std::int64_t>(n * n, 1), 1, 100);
  const std::int64_t least = most_alive(intervals);
  PlacedIntervals best;
  std::minstd_rand random(1);
  for (const Less less : kOrders) {
    std::vector<std::size_t> order(intervals.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return less(intervals[a], intervals[b]);
    });
    for (std::int64_t attempt = 0; attempt < tries && (best.offsets.empty() || best.bytes > least);
         ++attempt) {
      PlacedIntervals found = place_in(order, intervals);
      const auto is_highest = [&](std::size_t i) {
        return found.offsets[i] + rounded_up(intervals[i].bytes) == found.bytes;
      };
      const auto highest = std::find_if(order.begin(), order.end(), is_highest);
      if (highest != order.end())
        std::rotate(
            order.begin() + static_cast<std::ptrdiff_t>(
                                random() % static_cast<std::uint64_t>(highest - order.begin() + 1)),
            highest, highest + 1);
      if (best.offsets.empty() || found.bytes < best.bytes) best = std::move(found);
    }
  }
  return best;
}

std::int64_t most_alive(std::span<const Interval> intervals) {
  std::int64_t most = 0;
  for (const Interval& at : intervals) {  // the most are alive where one begins
    std::int64_t sum = 0;
    for (const Interval& one : intervals)
      if (one.begin <= at.begin && at.begin < one.end) sum += rounded_up(one.bytes);
    most = std::max(most, sum);
  }
  return most;
}

}  // namespace tessera
