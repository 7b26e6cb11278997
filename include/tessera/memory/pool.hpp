// The caching, stream-ordered allocator: who may reuse a byte, and after what.
//
//   nobody else touched the block: the home stream's own order does it
//   compute  alloc A ── use A ── free A ── alloc B in the same block ── use B
//
//   another stream did: the next user is gated, ordered on the device
//   compute  alloc A ── free A: gate {gather: 7} ── alloc B ── wait(gather 7) ── use B
//   gather        └── use A, tick 7 ───────────────────────────┘
//
// Note [Gates]
// A block has a home stream, the one that it was allocated on, and goes back to it when it is
// freed. At the free, each other stream that touched the block gets an event, unless the home
// stream or the host is ordered after that touch already: these events are the block's gate. When
// free blocks merge, their gates are joined. The block's next user is on the home stream again. It
// waits for the events that its clock does not cover yet. From then on the home stream's own order
// protects every part of the block, so the gate is dropped, and what is split off needs none.
// Nothing is ever polled: which block is reused depends on the host program alone, and peak memory
// is the same on every run. A segment keeps the last ticks of all streams that touched it, for the
// day when it goes back to the system.
//
// Note [Address order of large blocks]
// Blocks from kLargeBytes on have segments of their own, because a small block that stays must not
// stand where a large one has to grow. The list of free large blocks is in the order of addresses.
// An activation takes the first that fits. Another name of the ledger takes the first that fits
// beside a block of the same name, or else the first that fits. So large blocks that outlive the
// activations come to lie side by side, for example the gradients of the first of several
// micro-batches. What activations free is then one range. A unit's gradient shards have a few MiB
// and come after the peak. As large blocks they reuse what activations freed; as small ones they
// would add segments.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/detail/memory/upstream.hpp"
#include "tessera/device/device.hpp"
#include "tessera/memory/ledger.hpp"

namespace tessera {

// The alignment of every block, to which sizes are rounded up.
inline constexpr std::int64_t kAlignmentBytes = 256;
// The smallest piece taken from the system. Larger ones are multiples of it.
inline constexpr std::int64_t kSegmentBytes = 2ll << 20;
// A block of this size or more is large; see Note [Address order of large blocks].
inline constexpr std::int64_t kLargeBytes = 3ll << 20;

// The events that a freed block's next user waits for, at most one a stream; see Note [Gates].
using Gate = std::vector<Event>;

struct Block;

// A piece of memory from the system, cut into blocks. It grows at its end.
struct Segment {
  std::uint64_t number = 0;  // in order of taking
  bool is_large = false;     // holds large blocks
  Clock touched;             // last ticks of the blocks freed in it
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
  Block* last = nullptr;
};

// A piece of a segment: handed out, or free. It is the pool's own; users hold a Buffer.
struct Block {
  LastUse use;  // while handed out
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
  Segment* segment = nullptr;
  Block* before = nullptr;  // neighbours in memory
  Block* after = nullptr;
  Block* previous = nullptr;  // in the free list, or in the list of spare blocks
  Block* next = nullptr;
  Gate gate;                            // while free
  StreamId stream = StreamId::compute;  // its home
  bool free = false;
  OwnerId owner = 0;
  std::uint16_t size_class = 0;  // while free
};

// Ordered: a block handed out on `stream` may be used there at once, and elsewhere after an event.
// Threads: the host thread.
class Pool {
 public:
  Pool(DeviceContext& context, Ledger& ledger, std::unique_ptr<Upstream> upstream);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Hands out a block of at least `bytes`, booked under `owner`. If there is no memory, it releases
  // what is cached, and tries again.
  // Requires: bytes > 0.  Throws: OutOfMemory, carrying the ledger at the moment of failure.
  Block* allocate(std::int64_t bytes, StreamId stream, OwnerId owner);
  // Takes the block back; work already submitted may still use it.
  void free(Block* block) noexcept;

  // Gives free memory back to the system, once the host has blocked on what touched its segment:
  // the free end of every segment, or a whole segment. Returns the bytes given back.
  std::int64_t release_cached();
  // Forgets in which order memory was freed. Then the next block handed out depends only on what is
  // in use.
  void sort_free();

  std::int64_t reserved_bytes() const noexcept { return reserved_; }  // a part of Memory's
  // Limits reserved_bytes(); 0: no limit. On the CPU the limit begins as the machine's memory.
  void set_limit_bytes(std::int64_t bytes) noexcept { limit_ = bytes; }
  // Counts memory `what`, which the system gives directly, as a call of allocate. It throws where
  // that call would.
  void count_outside(std::int64_t bytes, const char* what);
  // How many waits reuse has cost so far; a steady step adds none.
  std::uint64_t gates_fired() const noexcept { return gates_fired_; }
  // How often memory has been taken from the system so far.
  std::uint64_t segments_taken() const noexcept { return segments_taken_; }

  // See Memory::poison_freed.
  void poison_freed() noexcept { poisons_ = true; }
  bool poisons() const noexcept { return poisons_; }

 private:
  friend struct PoolTesting;  // in runtime/memory/testing.hpp

  // A two-level segregated free list for each stream: sizes from 2^k on, cut in 16. Within a class
  // the last block freed is reused first, so the order never depends on addresses. Free blocks of
  // large segments are in class 0, in the order of their addresses.
  // Source: Masmano et al., "TLSF", ECRTS 2004.
  static constexpr std::uint32_t kSplitBits = 4;
  static constexpr std::uint32_t kClasses = 48 << kSplitBits;
  static constexpr std::uint32_t kLargeClass = 0;  // no size has this class
  struct FreeLists {
    std::array<Block*, kClasses> heads{};
    std::array<std::uint64_t, kClasses / 64> occupied{};
  };

  static std::uint32_t class_of(std::int64_t bytes);
  static std::uint32_t class_in(const Segment& segment, std::int64_t bytes);
  static Block* find(const FreeLists& lists, std::int64_t bytes);
  static Block* find_large(const FreeLists& lists, std::int64_t bytes, OwnerId owner);
  void insert(Block* block, std::uint32_t c);
  void remove(Block* block);
  void resize(Block* block, std::int64_t bytes);
  Block* piece(const Block& block, std::byte* data, std::int64_t bytes);
  Block* cut(Block* block, std::int64_t bytes);
  Block* cut_end(Block* block, std::int64_t bytes);
  void absorb(Block* block, Block* neighbour);
  Block* grow(std::int64_t bytes, StreamId stream);
  Block* append(Segment& segment, StreamId stream, std::int64_t bytes);
  Block* new_block();
  void add_blocks();  // to the spare ones
  void retire(Block* block) noexcept;
  void make_gate(Block* block);
  void pass_gate(Block* block);
  void poison_free(Block* block) noexcept;
  void tell(MemoryEvent::Kind kind, const Block& block, std::int64_t bytes, OwnerId owner) const;
  [[noreturn]] void fail(std::int64_t bytes, StreamId stream, OwnerId owner) const;

  DeviceContext& context_;
  Ledger& ledger_;
  std::unique_ptr<Upstream> upstream_;
  std::array<std::unique_ptr<FreeLists>, kMaxStreams> lists_;
  std::vector<std::unique_ptr<Segment>> segments_;
  std::vector<std::unique_ptr<Block[]>> chunks_;  // of blocks
  Block* spare_ = nullptr;
  std::int64_t reserved_ = 0;
  std::int64_t limit_ = 0;
  std::uint64_t allocations_ = 0;  // calls of allocate
  std::uint64_t fail_at_ = 0;      // the call that finds no memory; 0 except in tests
  std::uint64_t gates_fired_ = 0;
  std::uint64_t segments_taken_ = 0;
  bool poisons_ = false;
};

}  // namespace tessera
