// What only tests ask of a pool: to find no memory at a chosen call, and whether its lists are
// sound.
#pragma once

#include "tessera/memory/pool.hpp"

namespace tessera {

struct PoolTesting {
  // Calls of allocate so far.
  static std::uint64_t allocations(const Pool& pool) noexcept { return pool.allocations_; }
  // Call number `k`, counted from the pool's first, finds no memory, whatever there is. 0: none.
  static void fail_at(Pool& pool, std::uint64_t k) noexcept { pool.fail_at_ = k; }

  // Every invariant of the free lists and of neighbours in memory.
  static bool is_valid(const Pool& pool) {
    for (std::size_t s = 0; s < kMaxStreams; ++s) {
      if (!pool.lists_[s]) continue;
      const Pool::FreeLists& lists = *pool.lists_[s];
      for (std::uint32_t c = 0; c < Pool::kClasses; ++c) {
        const bool is_occupied = (lists.occupied[c / 64] >> (c % 64) & 1u) != 0;
        if ((lists.heads[c] != nullptr) != is_occupied) return false;
        for (const Block* b = lists.heads[c]; b; b = b->next)
          if (index(b->stream) != s || !is_valid(*b, c)) return false;
      }
    }
    return true;
  }

 private:
  // A block in the list of class `c`.
  static bool is_valid(const Block& b, std::uint32_t c) {
    if (!b.free || Pool::class_in(*b.segment, b.bytes) != c) return false;
    if (b.next && b.next->previous != &b) return false;
    if (b.next && c == Pool::kLargeClass && !is_before(b, *b.next)) return false;
    if (b.after && (b.after->before != &b || b.after->free)) return false;
    return !b.before || (b.before->after == &b && !b.before->free);
  }
  static bool is_before(const Block& a, const Block& b) {
    return a.segment == b.segment ? a.data < b.data : a.segment->number < b.segment->number;
  }
};

}  // namespace tessera
