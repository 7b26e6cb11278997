#include "tessera/memory/pool.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "runtime/base/assert.hpp"
#include "runtime/memory/poison.hpp"
#include "tessera/base/log.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace {

// Above what 47 bits of address can hold, the free lists have no class.
constexpr std::int64_t kLargestBytes = std::int64_t{1} << 46;

// Ticks are not negative, so their sum is that of one stream when no other has any.
bool touched_only_by(StreamId stream, const Clock& touched) {
  Tick sum = 0;
  for (const Tick tick : touched.ticks) sum += tick;
  return sum == touched[stream];
}

// The last of a list in the order of addresses that lies before `block`; null for none.
Block* last_before(const Block& block, Block* list) {
  const auto is_before = [&](const Block& b) {
    return b.segment == block.segment ? b.data < block.data
                                      : b.segment->number < block.segment->number;
  };
  Block* last = nullptr;
  for (Block* b = list; b && is_before(*b); b = b->next) last = b;
  return last;
}

bool is_of(OwnerId owner, const Block* block) { return block && block->owner == owner; }

// Moves the events of `other` to `gate`, of each stream the later one. What gates need is rare, and
// kept out of the functions that every allocation runs through.
[[gnu::noinline]] void join(Gate& gate, Gate& other) {
  for (const Event& event : other) {
    const auto same = std::find_if(gate.begin(), gate.end(),
                                   [&](const Event& e) { return e.stream == event.stream; });
    if (same == gate.end())
      gate.push_back(event);
    else if (same->tick < event.tick)
      *same = event;
  }
  other.clear();  // keeps its capacity, so that a pool in steady state allocates nothing
}

}  // namespace

Pool::Pool(DeviceContext& context, Ledger& ledger, std::unique_ptr<Upstream> upstream)
    : context_(context), ledger_(ledger), upstream_(std::move(upstream)) {}

Pool::~Pool() {
  try {
    context_.synchronize();
    release_cached();
  } catch (const std::exception& error) {
    log(LogLevel::error, concat("Pool: could not return its memory: ", error.what()));
  }
  if (reserved_ != 0) log(LogLevel::error, concat("Pool: ", reserved_, " bytes were never freed"));
}

// Class 16 k + i holds the sizes [2^k + i 2^(k-4), 2^k + (i+1) 2^(k-4)).
std::uint32_t Pool::class_of(std::int64_t bytes) {
  const auto size = static_cast<std::uint64_t>(bytes) | 1;
  const auto k = static_cast<std::uint32_t>(std::bit_width(size)) - 1;
  return ((k - 1) << kSplitBits) + static_cast<std::uint32_t>(size >> (k - kSplitBits));
}

std::uint32_t Pool::class_in(const Segment& segment, std::int64_t bytes) {
  return segment.is_large ? kLargeClass : class_of(bytes);
}

// Requires: `c` is the block's class.
void Pool::insert(Block* block, std::uint32_t c) {
  FreeLists& lists = *lists_[index(block->stream)];
  block->size_class = static_cast<std::uint16_t>(c);
  block->free = true;
  block->previous = c == kLargeClass ? last_before(*block, lists.heads[c]) : nullptr;
  Block*& here = block->previous ? block->previous->next : lists.heads[c];
  block->next = here;
  if (block->next) block->next->previous = block;
  here = block;
  lists.occupied[c / 64] |= std::uint64_t{1} << (c % 64);
}

void Pool::remove(Block* block) {
  block->free = false;
  if (block->next) block->next->previous = block->previous;
  if (block->previous) {
    block->previous->next = block->next;
    return;
  }
  FreeLists& lists = *lists_[index(block->stream)];
  const std::uint32_t c = block->size_class;
  lists.heads[c] = block->next;
  if (!block->next) lists.occupied[c / 64] &= ~(std::uint64_t{1} << (c % 64));
}

// The tightest of the first few blocks of the size's own class, else the first block of the next
// class that has one.
Block* Pool::find(const FreeLists& lists, std::int64_t bytes) {
  constexpr int kLook = 8;
  const std::uint32_t c = class_of(bytes);
  Block* best = nullptr;
  int looked = 0;
  for (Block* b = lists.heads[c]; b && looked < kLook; b = b->next, ++looked)
    if (b->bytes >= bytes && (!best || b->bytes < best->bytes)) best = b;
  if (best) return best;
  std::size_t word = (c + 1) / 64;
  std::uint64_t bits = lists.occupied[word] & (~std::uint64_t{0} << ((c + 1) % 64));
  while (bits == 0) {
    if (++word == lists.occupied.size()) return nullptr;
    bits = lists.occupied[word];
  }
  return lists.heads[word * 64 + static_cast<std::size_t>(std::countr_zero(bits))];
}

// See Note [Address order of large blocks].
Block* Pool::find_large(const FreeLists& lists, std::int64_t bytes, OwnerId owner) {
  Block* first = nullptr;
  for (Block* b = lists.heads[kLargeClass]; b; b = b->next) {
    if (b->bytes < bytes) continue;
    if (owner == kActivations || is_of(owner, b->before) || is_of(owner, b->after)) return b;
    if (!first) first = b;
  }
  return first;
}

Block* Pool::new_block() {
  if (!spare_) add_blocks();
  return std::exchange(spare_, spare_->next);
}
void Pool::add_blocks() {
  constexpr std::size_t kChunk = 256;
  chunks_.push_back(std::make_unique<Block[]>(kChunk));
  for (std::size_t i = 0; i < kChunk; ++i) retire(&chunks_.back()[i]);
}

// Requires: no gate.
void Pool::retire(Block* block) noexcept {
  block->next = spare_;
  spare_ = block;
}

// A block of its own for `bytes` at `data`, which are a part of `block`.
Block* Pool::piece(const Block& block, std::byte* data, std::int64_t bytes) {
  Block* const part = new_block();
  part->data = data;
  part->bytes = bytes;
  part->segment = block.segment;
  part->stream = block.stream;
  return part;
}

// The free block's front; what is left stays free.
Block* Pool::cut(Block* block, std::int64_t bytes) {
  Block* const front = piece(*block, block->data, bytes);
  front->before = block->before;
  front->after = block;
  if (front->before) front->before->after = front;
  block->before = front;
  block->data += bytes;
  resize(block, block->bytes - bytes);
  return front;
}

// Its end.  Requires: another block lies behind it.
Block* Pool::cut_end(Block* block, std::int64_t bytes) {
  Block* const end = piece(*block, block->data + block->bytes - bytes, bytes);  // it may throw
  resize(block, block->bytes - bytes);
  end->before = block;
  end->after = block->after;
  block->after = end->after->before = end;
  return end;
}

// A free block has another size: in its list it stays where it is as long as that is the right one.
void Pool::resize(Block* block, std::int64_t bytes) {
  block->bytes = bytes;
  if (block->size_class == kLargeClass) return;
  const std::uint32_t c = class_of(bytes);
  if (c == block->size_class) return;
  remove(block);
  insert(block, c);
}

// `block`, which is free, takes in its neighbour, which is in no list.
void Pool::absorb(Block* block, Block* neighbour) {
  if (neighbour == block->after) {
    block->after = neighbour->after;
    (block->after ? block->after->before : block->segment->last) = block;
  } else {
    block->data = neighbour->data;
    block->before = neighbour->before;
    if (block->before) block->before->after = block;
  }
  if (!neighbour->gate.empty()) join(block->gate, neighbour->gate);
  resize(block, block->bytes + neighbour->bytes);
  retire(neighbour);
}

[[gnu::noinline]] void Pool::make_gate(Block* block) {
  const Clock &home = context_.clock(block->stream), &host = context_.host_clock();
  for (const StreamId s : kStreams)
    if (const Tick tick = block->use.touched[s];
        s != block->stream && tick > home[s] && tick > host[s])
      block->gate.push_back(context_.event_of_free(s, tick));
}

[[gnu::noinline]] void Pool::pass_gate(Block* block) {
  for (const Event& event : block->gate) {
    if (context_.clock(block->stream)[event.stream] >= event.tick ||
        context_.host_clock()[event.stream] >= event.tick)
      continue;
    context_.wait(block->stream, event);
    ++gates_fired_;
  }
  block->gate.clear();
}

Block* Pool::allocate(std::int64_t bytes, StreamId stream, OwnerId owner) {
  TESSERA_EXPECT(bytes > 0, "allocate: ", bytes, " bytes; ask for at least one");
  if (bytes > kLargestBytes || ++allocations_ == fail_at_) fail(bytes, stream, owner);
  const std::int64_t rounded = (bytes + kAlignmentBytes - 1) & -kAlignmentBytes;
  auto& lists = lists_[index(stream)];
  if (!lists) lists = std::make_unique<FreeLists>();
  const bool is_large = rounded >= kLargeBytes;
  Block* block = is_large ? find_large(*lists, rounded, owner) : find(*lists, rounded);
  if (!block) block = grow(rounded, stream);
  if (!block && release_cached() > 0) block = grow(rounded, stream);
  if (!block) fail(rounded, stream, owner);
  if (context_.is_observed()) [[unlikely]]
    tell(MemoryEvent::Kind::claimed, *block, rounded, owner);
  if (!block->gate.empty()) pass_gate(block);
  if (block->bytes == rounded)
    remove(block);
  else if (is_large && is_of(owner, block->after) && !is_of(owner, block->before))
    block = cut_end(block, rounded);
  else
    block = cut(block, rounded);
  block->use = {};
  block->owner = owner;
  ledger_.add(owner, rounded);
  if (context_.is_observed()) [[unlikely]]
    tell(MemoryEvent::Kind::handed_out, *block, rounded, owner);
  if (poisons_) poison(context_, stream, block->use, block->data, block->bytes);
  return block;
}

// Of the first `bytes` of `block`.
void Pool::tell(MemoryEvent::Kind kind, const Block& block, std::int64_t bytes,
                OwnerId owner) const {
  context_.tell({.kind = kind,
                 .begin = block.data,
                 .end = block.data + bytes,
                 .owner = ledger_.name(owner),
                 .stream = block.stream});
}

void Pool::free(Block* block) noexcept {
  ledger_.remove(block->owner, block->bytes);
  if (poisons_) poison_free(block);
  block->segment->touched.merge(block->use.touched);
  if (!touched_only_by(block->stream, block->use.touched)) make_gate(block);
  if (context_.is_observed()) [[unlikely]]
    tell(MemoryEvent::Kind::given_back, *block, block->bytes, block->owner);
  Block *const before = block->before, *const after = block->after;
  const bool joins_after = after && after->free;
  if (before && before->free) {
    absorb(before, block);
    if (!joins_after) return;
    remove(after);
    absorb(before, after);
  } else if (joins_after) {
    absorb(after, block);
  } else {
    insert(block, class_in(*block->segment, block->bytes));
  }
}

}  // namespace tessera
