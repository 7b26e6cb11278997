// Numbered slots: the memory of gathered parameters and unreduced gradients.
//
// Note [Why taking a slot waits]
// Suppose that these buffers came from the pool. What a unit frees, the next gather would get at
// once, and would have to wait for the unit that has just computed: wherever an address happens to
// repeat, communication would stop overlapping with compute. So the number of buffers is planned
// instead, each is a slot, and the one that was given back longest ago is taken first. Taking a
// slot makes the taker wait, on the device, for the last use of that slot and for nothing else:
//
//   gather   slot 0: unit 1 │ slot 1: unit 2 │ wait(unit 1 done) slot 0: unit 3 │
//   compute        │ unit 1 ............done │ unit 2 ..................... done │ unit 3
//
// Note [How many slots]
// depth + nesting. Nesting is the longest chain of units open inside one another, the root apart: 1
// for plain blocks. Depth is what runs beside them: the units gathered ahead (prefetch_depth), or
// the reductions in flight. For plain blocks and depth d there are d + 1 slots, and the gather of
// unit i + d runs beside the compute of unit i.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tessera/memory/memory.hpp"

namespace tessera {

// A slot in use: `bytes` at `data`. A plain value; the ring that gave it takes it back.
struct Slot {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
  LastUse* use = nullptr;
  int number = -1;
};

// `count` slots of equal capacity in memory that somebody else keeps. Taken slots are booked in the
// ledger.
class SlotRing {
 public:
  SlotRing() = default;
  // Slot k lies at data + k * capacity_bytes. `owner` is the ledger's name for what is taken.
  SlotRing(DeviceContext& context, std::byte* data, std::int64_t capacity_bytes, int count,
           std::string_view owner);

  // The slot given back longest ago, for use by `stream`, which is made to wait for the slot's last
  // use.
  // Throws: ContractError when every slot is taken, or `bytes` is not in [1, capacity_bytes()].
  Slot take(std::int64_t bytes, StreamId stream);
  // Whoever takes the slot next waits for the uses up to here, where no others follow. For a slot
  // that is given back long after its last use, since events can't be recorded for the past.
  void note_uses(const Slot& slot);
  // Work already submitted may still use it.  Throws: ContractError for a slot that is not taken.
  void give_back(const Slot& slot);
  // Slots are taken in the order of a new ring, so that ranks which had taken different numbers of
  // them agree again.  Requires: none is taken, and the host knows that all uses are over.
  void restart();

  int count() const noexcept { return static_cast<int>(entries_.size()); }
  int taken() const noexcept { return taken_; }
  std::int64_t capacity_bytes() const noexcept { return capacity_; }

 private:
  struct Entry {
    LastUse use;
    std::vector<Event> last_use;  // of every stream that used it, recorded when it was given back
    std::vector<Event> noted;     // the same, recorded earlier
    std::uint64_t returned = 0;   // when, counted in give_backs
    std::int64_t booked = 0;      // 0 while free
    const Event* noted_at(StreamId stream, Tick used) const;
  };
  void poison_returned(int number);
  void tell(MemoryEvent::Kind kind, int number, StreamId stream) const;

  DeviceContext* context_ = nullptr;
  std::byte* data_ = nullptr;
  std::int64_t capacity_ = 0;
  OwnerId owner_ = 0;
  std::vector<Entry> entries_;
  std::uint64_t returns_ = 0;
  int taken_ = 0;
};

}  // namespace tessera
