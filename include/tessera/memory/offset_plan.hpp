// Offsets for buffers whose lifetimes are known: the arithmetic behind the plan of an arena.
// Nothing here knows memory.
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
// Offsets such that no two buffers overlap both in time and in address. Best fit: each goes into
// the smallest gap between those that it meets. Several orders of placing them are tried, and the
// one that needs the fewest bytes is taken. The same intervals get the same offsets, on every rank.
// Source: Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020
// (greedy by size, for offsets).
PlacedIntervals place(std::span<const Interval> intervals);
// The most bytes that are alive at a time, with sizes rounded up as by `place`. No placement needs
// fewer.
std::int64_t most_alive(std::span<const Interval> intervals);

// [begin, end) of memory.
struct AddressRange {
  std::int64_t begin = 0, end = 0;
};
// The begin of the smallest gap that holds `bytes`, between `taken` and below `limit`; the first of
// equals, -1 for none. It sorts `taken`.
std::int64_t smallest_gap(std::vector<AddressRange>& taken, std::int64_t bytes, std::int64_t limit);

}  // namespace tessera
