// The memory of gathered parameters and unreduced gradients: slots of several sizes in one block,
// at offsets planned from the intervals in which they are alive.
//
//   address  │ head ............│ block 7 ...│ block 5 ...   a slot lies where a plan says,
//            │ block 0 │ block 1 ...│ block 6 ...│            or where nobody lives
//            └──────────────────────────────────▶ time
//
// Note [Why taking a slot waits]
// Suppose that these buffers came from the pool. The next gather would get at once what a unit
// frees. So it would have to wait for the unit that has just computed. Wherever an address happens
// to repeat, communication would stop overlapping with compute. So addresses are planned: buffers
// that are to run side by side lie apart, because their intervals were made to overlap. The use of
// a slot first waits, on the device, for the last uses of all earlier holders that overlap it in
// address, and for nothing else.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/memory/memory.hpp"

namespace tessera {

class Arena;

// A range of an arena in use: `bytes` at `data`. A plain value, which its arena takes back. Empty
// without an arena.
struct Slot {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
  LastUse* use = nullptr;
  Arena* arena = nullptr;
  int number = -1;

  Access access(AccessMode mode) const noexcept { return {use, data, data + bytes, mode}; }
};

// Slots in memory that somebody else keeps.
class Arena {
 public:
  Arena(DeviceContext& context, std::byte* data, std::int64_t bytes)
      : context_(context), data_(data), bytes_(bytes) {}
  Arena(const Arena&) = delete;  // slots point to it
  Arena& operator=(const Arena&) = delete;

  // Whether [offset, offset + bytes) lies in the arena, and nobody holds a byte of it.
  bool is_free(std::int64_t offset, std::int64_t bytes) const;
  // The offset of the smallest gap between the slots in use that holds `bytes`, the first of
  // equals; -1: there is none. It depends on these slots alone, so ranks that take and give back in
  // one order agree.
  std::int64_t best_gap(std::int64_t bytes) const;

  // Takes [offset, offset + bytes), booked in the ledger under `owner`. Returns an empty slot
  // unless it is free.
  Slot take(std::int64_t offset, std::int64_t bytes, OwnerId owner);
  // Called before the first use, on `stream`. It makes the stream wait for the last uses of all
  // earlier holders that overlap the slot.
  void begin_use(const Slot& slot, StreamId stream);
  // Says that no use follows the uses so far: the next holder of a part of the slot waits for
  // these. It is for a slot that is given back long after its last use, since events can't be
  // recorded for the past.
  void note_uses(const Slot& slot);
  // Gives the slot back; work already submitted may still use it. Throws: ContractError for a slot
  // that is not taken.
  void give_back(const Slot& slot);
  // Forgets all earlier holders. Requires: no slot is taken, and the host knows that all uses are
  // over.
  void restart();

  std::int64_t bytes() const noexcept { return bytes_; }

 private:
  struct Holder {
    std::int64_t begin = 0, end = 0;  // rounded up; end is 0 while nobody holds it
    OwnerId owner = 0;
    LastUse use{};
    bool is_used = false;
    std::vector<Event> noted{};   // of its uses so far
    std::vector<Event> events{};  // the last uses of holders before it, at the end its own
  };
  // Bytes that nobody holds, and what was last done to them. No two overlap. Where there is no
  // entry, the host knows that no use runs.
  struct Past {
    std::int64_t begin = 0, end = 0;
    std::vector<Event> last_use;
  };
  Holder& holder(const Slot& slot) { return *holders_.at(static_cast<std::size_t>(slot.number)); }
  void cut_out(std::int64_t begin, std::int64_t end, std::vector<Event>& last_use);
  void record_last_use(Holder& holder);
  void poison_returned(Holder& holder);
  void tell(MemoryEvent::Kind kind, const Holder& holder, StreamId stream) const;

  DeviceContext& context_;
  std::byte* data_;
  std::int64_t bytes_;
  std::vector<std::unique_ptr<Holder>> holders_;  // `use` is pointed to
  std::vector<Past> past_;
  int taken_ = 0;
};

}  // namespace tessera
