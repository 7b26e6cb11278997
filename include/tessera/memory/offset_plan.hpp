// Offsets for buffers of which it is known from when to when they live: the arithmetic behind the
// plan of an arena. Nothing here knows memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

// A buffer that lives from `begin` to before `end`, in steps of any clock.
struct Interval {
  std::int64_t bytes = 0, begin = 0, end = 0;
  std::int64_t offset = -1;  // where it lies already; -1: to be planned
};
struct PlacedIntervals {
  std::vector<std::int64_t> offsets{};  // of each interval, multiples of kAlignmentBytes
  std::int64_t bytes = 0;               // the end of the highest
};
// Offsets such that no two buffers overlap in time and in address. Best fit: each goes into the
// smallest gap between those that it meets; of several orders in which to place them, the one that
// needs the fewest bytes. The same for the same intervals, on every rank.
// Source: Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020
// (greedy by size, for offsets).
PlacedIntervals place(std::span<const Interval> intervals);
// The most bytes that are alive at a time, each rounded up as `place` does: no placement needs
// fewer.
std::int64_t most_alive(std::span<const Interval> intervals);

// [begin, end) of memory.
struct AddressRange {
  std::int64_t begin = 0, end = 0;
};
// Where the smallest gap between `taken`, which it sorts, and below `limit` begins that holds
// `bytes`; the first of equals, -1 for none.
std::int64_t smallest_gap(std::vector<AddressRange>& taken, std::int64_t bytes, std::int64_t limit);

}  // namespace tessera
