#include "tessera/memory/offset_plan.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include "tessera/detail/base/checked.hpp"
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

// Intervals that are placed again and again, in one order after another.
class Placer {
 public:
  explicit Placer(std::span<const Interval> intervals)
      : words_((intervals.size() + 63) / 64),
        meets_(intervals.size() * words_),
        spans_(intervals.size()),
        met_(intervals.size()) {
    for (std::size_t i = 0; i < intervals.size(); ++i) {
      const Interval& one = intervals[i];
      bytes_.push_back(rounded_up(one.bytes));
      for (std::size_t k = 0; k < intervals.size(); ++k)
        if (intervals[k].begin < one.end && one.begin < intervals[k].end)
          meets_[i * words_ + k / 64] |= std::uint64_t{1} << k % 64;
      if (one.offset >= 0) put(i, one.offset, kFixed);
    }
  }

  // The end of the highest. `order` is that of the last call up to `first`, from where it begins.
  std::int64_t place(const std::vector<std::size_t>& order, std::ptrdiff_t first) {
    std::erase_if(by_address_, [&](std::size_t i) { return spans_[i].turn >= first; });
    for (std::ptrdiff_t turn = first; turn < std::ssize(order); ++turn)
      if (const std::size_t i = order[static_cast<std::size_t>(turn)]; spans_[i].turn != kFixed)
        put(i, smallest_gap_for(i), turn);
    std::int64_t most = 0;
    for (const Span& span : spans_) most = std::max(most, span.end);
    return most;
  }
  std::int64_t end(std::size_t i) const { return spans_[i].end; }
  PlacedIntervals placed(std::int64_t bytes) const {
    PlacedIntervals out{.bytes = bytes};
    for (const Span& span : spans_) out.offsets.push_back(span.begin);
    return out;
  }

 private:
  static constexpr std::ptrdiff_t kFixed = -1;
  struct Span {
    std::int64_t begin = 0, end = 0;
    std::ptrdiff_t turn = 0;  // when it was placed
  };

  void put(std::size_t i, std::int64_t offset, std::ptrdiff_t turn) {
    spans_[i] = {offset, offset + bytes_[i], turn};
    const auto at = std::upper_bound(
        by_address_.begin(), by_address_.end(), offset,
        [this](std::int64_t begin, std::size_t k) { return begin < spans_[k].begin; });
    by_address_.insert(at, i);
  }
  // Between those that it meets, or behind them.
  std::int64_t smallest_gap_for(std::size_t i) {
    const std::uint64_t* const meets = &meets_[i * words_];
    std::size_t count = 0;  // no branch, which nothing could predict
    for (const std::size_t k : by_address_) met_[count] = k, count += meets[k / 64] >> k % 64 & 1U;
    std::int64_t best = -1, best_size = 0, at = 0;
    for (std::size_t m = 0; m < count; ++m) {
      const std::size_t k = met_[m];
      const std::int64_t size = spans_[k].begin - at;
      if (size >= bytes_[i] && (best < 0 || size < best_size)) best = at, best_size = size;
      at = std::max(at, spans_[k].end);
    }
    return best < 0 ? at : best;
  }

  const std::size_t words_;           // of a set of intervals, a bit each
  std::vector<std::uint64_t> meets_;  // for each interval the set of those that it meets
  std::vector<std::int64_t> bytes_;   // rounded
  std::vector<Span> spans_;
  std::vector<std::size_t> by_address_, met_;
};

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
  Placer placer(intervals);
  PlacedIntervals best;
  std::minstd_rand random(1);
  for (const Less less : kOrders) {
    std::vector<std::size_t> order(intervals.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return less(intervals[a], intervals[b]);
    });
    std::ptrdiff_t first = 0;
    for (std::int64_t attempt = 0; attempt < tries && (best.offsets.empty() || best.bytes > least);
         ++attempt) {
      const std::int64_t bytes = placer.place(order, first);
      if (best.offsets.empty() || bytes < best.bytes) best = placer.placed(bytes);
      const auto is_highest = [&](std::size_t i) { return placer.end(i) == bytes; };
      const auto highest = std::find_if(order.begin(), order.end(), is_highest);
      first = std::ssize(order);
      if (highest == order.end()) continue;
      first = static_cast<std::ptrdiff_t>(random() %
                                          static_cast<std::uint64_t>(highest - order.begin() + 1));
      std::rotate(order.begin() + first, highest, highest + 1);
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
