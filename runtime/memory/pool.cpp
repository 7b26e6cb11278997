#include "tessera/memory/pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>

#include "runtime/base/assert.hpp"
#include "runtime/memory/poison.hpp"
#include "tessera/base/checked.hpp"
#include "tessera/base/log.hpp"

namespace tessera {
namespace {

// Above what 47 bits of address can hold, the free lists have no class.
constexpr std::int64_t kLargestBytes = std::int64_t{1} << 46;

class SystemMemory final : public Upstream {
 public:
  std::byte* allocate(std::int64_t bytes) noexcept override {
    void* data = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
  }
  void release(std::byte* data, std::int64_t bytes) noexcept override {
    munmap(data, static_cast<std::size_t>(bytes));
  }
};

class CountedMemory final : public Upstream {
 public:
  std::byte* allocate(std::int64_t bytes) noexcept override {
    const std::uintptr_t data = next_;
    next_ += static_cast<std::uintptr_t>(bytes);
    return reinterpret_cast<std::byte*>(data);
  }
  void release(std::byte*, std::int64_t) noexcept override {}

 private:
  std::uintptr_t next_ = std::uintptr_t{1} << 47;  // outside what user space can map
};

}  // namespace

std::unique_ptr<Upstream> system_memory() { return std::make_unique<SystemMemory>(); }
std::unique_ptr<Upstream> counted_memory() { return std::make_unique<CountedMemory>(); }

void Gate::merge(const Gate& other) {
  ticks.merge(other.ticks);
  for (const Event& event : other.events) {
    const auto same = std::find_if(events.begin(), events.end(),
                                   [&](const Event& e) { return e.stream == event.stream; });
    if (same == events.end())
      events.push_back(event);
    else if (same->tick < event.tick)
      *same = event;
  }
}

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

// Class of the sizes [2^k + i 2^(k-4), 2^k + (i+1) 2^(k-4)).
int Pool::class_of(std::int64_t bytes) {
  const auto size = static_cast<std::uint64_t>(bytes);
  const int k = std::bit_width(size) - 1;
  const int i = static_cast<int>(size >> (k - kSplitBits)) & ((1 << kSplitBits) - 1);
  return (k << kSplitBits) | i;
}

void Pool::insert(Block* block) {
  auto& lists = lists_[index(block->stream)];
  if (!lists) lists = std::make_unique<FreeLists>();
  const int c = class_of(block->bytes);
  block->free = true;
  block->previous = nullptr;
  block->next = lists->heads[c];
  if (block->next) block->next->previous = block;
  lists->heads[c] = block;
  lists->occupied[c / 64] |= std::uint64_t{1} << (c % 64);
}

void Pool::remove(Block* block) {
  FreeLists& lists = *lists_[index(block->stream)];
  const int c = class_of(block->bytes);
  if (block->next) block->next->previous = block->previous;
  if (block->previous)
    block->previous->next = block->next;
  else if ((lists.heads[c] = block->next) == nullptr)
    lists.occupied[c / 64] &= ~(std::uint64_t{1} << (c % 64));
  block->free = false;
  block->previous = block->next = nullptr;
}

// The tightest of the first few blocks of the size's own class, else the first block of the next
// class that has one.
Block* Pool::find(FreeLists& lists, std::int64_t bytes) const {
  constexpr int kLook = 8;
  const int c = class_of(bytes);
  Block* best = nullptr;
  int looked = 0;
  for (Block* b = lists.heads[c]; b && looked < kLook; b = b->next, ++looked)
    if (b->bytes >= bytes && (!best || b->bytes < best->bytes)) best = b;
  if (best) return best;
  int word = (c + 1) / 64;
  std::uint64_t bits = lists.occupied[word] & (~std::uint64_t{0} << ((c + 1) % 64));
  while (bits == 0) {
    if (++word == static_cast<int>(lists.occupied.size())) return nullptr;
    bits = lists.occupied[word];
  }
  return lists.heads[word * 64 + std::countr_zero(bits)];
}

Block* Pool::record() {
  if (!spare_) {
    constexpr std::size_t kChunk = 256;
    records_.push_back(std::make_unique<Block[]>(kChunk));
    for (std::size_t i = 0; i < kChunk; ++i) retire(&records_.back()[i]);
  }
  Block* block = spare_;
  spare_ = block->next;
  block->next = nullptr;
  return block;
}

void Pool::retire(Block* block) noexcept {
  *block = Block{};
  block->next = spare_;
  spare_ = block;
}

Block* Pool::grow(std::int64_t bytes, StreamId stream) {
  const std::int64_t segment = round_up(bytes, kSegmentBytes);
  if (limit_ != 0 && reserved_ + segment > limit_) return nullptr;
  std::byte* data = upstream_->allocate(segment);
  if (!data) return nullptr;
  reserved_ += segment;
  ++segments_taken_;
  Block* block = record();
  block->data = data;
  block->bytes = segment;
  block->stream = stream;
  insert(block);
  context_.tell({.kind = MemoryEvent::Kind::acquired, .begin = data, .end = data + segment});
  return block;
}

// Cuts the tail off a block that is larger than asked; the tail keeps the gate.
void Pool::split(Block* block, std::int64_t bytes) {
  if (block->bytes == bytes) return;
  Block* tail = record();
  tail->data = block->data + bytes;
  tail->bytes = block->bytes - bytes;
  tail->stream = block->stream;
  tail->gate = block->gate;
  tail->before = block;
  tail->after = block->after;
  if (tail->after) tail->after->before = tail;
  block->after = tail;
  block->bytes = bytes;
  insert(tail);
}

void Pool::pass_gate(Block* block, StreamId stream) {
  for (const Event& event : block->gate.events) {
    if (context_.clock(stream)[event.stream] >= event.tick ||
        context_.host_clock()[event.stream] >= event.tick)
      continue;
    context_.wait(stream, event);
    ++gates_fired_;
  }
}

Block* Pool::allocate(std::int64_t bytes, StreamId stream, OwnerId owner) {
  TESSERA_EXPECT(bytes > 0, "allocate: ", bytes, " bytes; ask for at least one");
  const std::int64_t rounded = round_up(bytes, kAlignmentBytes);
  if (rounded > kLargestBytes) fail(rounded, stream, owner);
  auto& lists = lists_[index(stream)];
  if (!lists) lists = std::make_unique<FreeLists>();
  Block* block = find(*lists, rounded);
  if (!block) block = grow(rounded, stream);
  if (!block && release_cached() > 0) block = grow(rounded, stream);
  if (!block) fail(rounded, stream, owner);
  remove(block);
  split(block, rounded);
  if (context_.is_observed()) [[unlikely]]
    tell(MemoryEvent::Kind::claimed, *block, owner);
  pass_gate(block, stream);
  block->use = {};
  block->owner = owner;
  ledger_.add(owner, rounded);
  if (context_.is_observed()) [[unlikely]]
    tell(MemoryEvent::Kind::handed_out, *block, owner);
  if (poisons_) poison(context_, stream, block->use, block->data, block->bytes);
  return block;
}

// Only where the owner is ordered after every use; else the next taker does it. See Note [Poison
// adds no edge].
void Pool::poison_free(Block* block) noexcept {
  try {
    if (follows(context_, block->stream, block->use))
      poison(context_, block->stream, block->use, block->data, block->bytes);
  } catch (const std::exception& error) {
    log(LogLevel::error, concat("Pool: could not poison what is freed: ", error.what()));
  }
}

void Pool::tell(MemoryEvent::Kind kind, const Block& block, OwnerId owner) const {
  context_.tell({.kind = kind,
                 .begin = block.data,
                 .end = block.data + block.bytes,
                 .owner = ledger_.name(owner),
                 .stream = block.stream});
}

void Pool::free(Block* block) noexcept {
  ledger_.remove(block->owner, block->bytes);
  if (poisons_) poison_free(block);
  Gate& gate = block->gate;
  gate.ticks.merge(block->use.touched);
  std::erase_if(gate.events, [&](const Event& e) {
    return context_.clock(block->stream)[e.stream] >= e.tick ||
           context_.host_clock()[e.stream] >= e.tick;
  });
  for (std::size_t i = 0; i < kMaxStreams; ++i) {
    const auto s = static_cast<StreamId>(i);
    const Tick tick = block->use.touched[s];
    if (s == block->stream || tick <= context_.clock(block->stream)[s] ||
        tick <= context_.host_clock()[s])
      continue;
    gate.merge(Gate{{}, {context_.event_of_free(s, tick)}});
  }
  if (context_.is_observed()) [[unlikely]]
    tell(MemoryEvent::Kind::given_back, *block, block->owner);
  // Merge with free neighbours; the result carries both gates.
  if (Block* after = block->after; after && after->free) {
    remove(after);
    block->bytes += after->bytes;
    block->gate.merge(after->gate);
    block->after = after->after;
    if (block->after) block->after->before = block;
    retire(after);
  }
  if (Block* before = block->before; before && before->free) {
    remove(before);
    before->bytes += block->bytes;
    before->gate.merge(block->gate);
    before->after = block->after;
    if (before->after) before->after->before = before;
    retire(block);
    block = before;
  }
  insert(block);
}

std::int64_t Pool::release_cached() {
  std::int64_t released = 0;
  for (auto& lists : lists_) {
    if (!lists) continue;
    for (Block* head : lists->heads) {
      for (Block* block = head; block != nullptr;) {
        Block* const next = block->next;
        if (!block->before && !block->after) {
          // Everything that touched it must be over before the system gets it back, the owner's own
          // work included.
          for (std::size_t i = 0; i < kMaxStreams; ++i) {
            const auto s = static_cast<StreamId>(i);
            if (block->gate.ticks[s] > context_.host_clock()[s])
              context_.block(context_.event_covering(s, block->gate.ticks[s]));
          }
          remove(block);
          context_.tell({.kind = MemoryEvent::Kind::released,
                         .begin = block->data,
                         .end = block->data + block->bytes});
          upstream_->release(block->data, block->bytes);
          reserved_ -= block->bytes;
          released += block->bytes;
          retire(block);
        }
        block = next;
      }
    }
  }
  return released;
}

void Pool::fail(std::int64_t bytes, StreamId stream, OwnerId owner) const {
  throw OutOfMemory(
      concat("allocate: no ", bytes, " bytes for '", ledger_.lines()[owner].owner, "' on stream ",
             name(stream), ": ", ledger_.live_bytes(), " are in use, ", reserved_, " are reserved",
             limit_ ? concat(", the limit is ", limit_) : std::string(),
             "; make the batch or the model smaller, or use more ranks\n", ledger_.table()));
}

bool Pool::is_valid() const {
  for (std::size_t s = 0; s < kMaxStreams; ++s) {
    if (!lists_[s]) continue;
    for (int c = 0; c < kClasses; ++c) {
      const Block* head = lists_[s]->heads[c];
      if ((head != nullptr) != ((lists_[s]->occupied[c / 64] >> (c % 64) & 1u) != 0)) return false;
      for (const Block* b = head; b; b = b->next) {
        if (!b->free || index(b->stream) != s || class_of(b->bytes) != c) return false;
        if (b->next && b->next->previous != b) return false;
        if (b->after && (b->after->before != b || b->after->free)) return false;
        if (b->before && (b->before->after != b || b->before->free)) return false;
      }
    }
  }
  return true;
}

}  // namespace tessera
