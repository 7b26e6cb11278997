// The pool's segments: how it takes memory from where that comes from and gives it back, and what
// it says when there is none. Rare, and apart from the functions that every allocation runs
// through.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/memory/limits.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/pool.hpp"

namespace tessera {

// More memory for `stream`: at the end of a segment that it has for blocks of the kind, behind or
// as part of the free block there, else a new segment. What may throw for lack of memory of the
// host's comes before anything is taken.
Block* Pool::grow(std::int64_t bytes, StreamId stream) {
  if (!spare_) add_blocks();
  const bool is_large = bytes >= kLargeBytes;
  const auto has_room = [&](std::int64_t more) {
    return limit_ == 0 || reserved_ + more <= limit_;
  };
  for (const auto& segment : segments_) {
    Block* const last = segment->last;
    if (last->stream != stream || segment->is_large != is_large) continue;
    if (last->free && last->bytes >= bytes) return last;  // find() looks at a few of a class only
    const std::int64_t more = round_up(bytes - (last->free ? last->bytes : 0), kSegmentBytes);
    if (has_room(more) && upstream_->resize(segment->data, segment->bytes, segment->bytes + more))
      return append(*segment, stream, more);
  }
  const std::int64_t size = round_up(bytes, kSegmentBytes);
  auto segment = std::make_unique<Segment>();
  segments_.reserve(segments_.size() + 1);
  segment->number = segments_taken_;
  segment->is_large = is_large;
  segment->data = has_room(size) ? upstream_->allocate(size) : nullptr;
  if (!segment->data) return nullptr;
  segments_.push_back(std::move(segment));
  return append(*segments_.back(), stream, size);
}

// The free block that `bytes` more at the end of a segment make.
Block* Pool::append(Segment& segment, StreamId stream, std::int64_t bytes) {
  std::byte* const data = segment.data + segment.bytes;
  context_.tell({.kind = MemoryEvent::Kind::acquired, .begin = data, .end = data + bytes});
  reserved_ += bytes;
  segment.bytes += bytes;
  ++segments_taken_;
  Block* const before = segment.last;
  if (before && before->free) {
    resize(before, before->bytes + bytes);
    return before;
  }
  Block* const block = new_block();
  block->data = data;
  block->bytes = bytes;
  block->segment = &segment;
  block->before = before;
  block->after = nullptr;
  block->stream = stream;
  if (before) before->after = block;
  segment.last = block;
  insert(block, class_in(segment, bytes));
  return block;
}

void Pool::sort_free() {
  for (const auto& lists : lists_)
    for (std::uint32_t c = 0; lists && c < kClasses; ++c) {
      std::vector<Block*> blocks;
      for (Block* b = lists->heads[c]; b; b = b->next) blocks.push_back(b);
      std::ranges::sort(blocks, [](const Block* a, const Block* b) {
        return std::pair(a->segment->number, a->data) < std::pair(b->segment->number, b->data);
      });
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        blocks[i]->previous = i > 0 ? blocks[i - 1] : nullptr;
        blocks[i]->next = i + 1 < blocks.size() ? blocks[i + 1] : nullptr;
      }
      if (!blocks.empty()) lists->heads[c] = blocks.front();
    }
}

std::int64_t Pool::release_cached() {
  context_.block_on_replays();
  std::int64_t released = 0;
  for (const auto& segment : segments_) {
    Block* const last = segment->last;
    // Whole segment sizes; what a smaller rest would save is not worth a longer list of sizes.
    const std::int64_t kept = round_up(last->data - segment->data, kSegmentBytes);
    if (!last->free || kept == segment->bytes) continue;
    // Everything that touched it must be over before the system gets it back, the home stream's
    // work included.
    context_.block_on(segment->touched);
    const std::int64_t bytes = segment->bytes - kept;
    if (kept > 0 && !upstream_->resize(segment->data, segment->bytes, kept)) continue;
    context_.tell({.kind = MemoryEvent::Kind::released,
                   .begin = segment->data + kept,
                   .end = segment->data + segment->bytes});
    if (kept == 0) upstream_->release(segment->data, segment->bytes);
    reserved_ -= bytes;
    released += bytes;
    segment->bytes = kept;
    if (last->bytes > bytes) {
      resize(last, last->bytes - bytes);
      continue;
    }
    remove(last);
    last->gate.clear();
    segment->last = last->before;
    if (last->before) last->before->after = nullptr;
    retire(last);
  }
  std::erase_if(segments_, [](const auto& segment) { return segment->bytes == 0; });
  return released;
}

void Pool::count_outside(std::int64_t bytes, const char* what) {
  if (++allocations_ == fail_at_)
    throw OutOfMemory(concat("allocate: no ", bytes, " bytes of ", what,
                             "; make the batch or the model smaller, or use more ranks"));
}

void Pool::fail(std::int64_t bytes, StreamId stream, OwnerId owner) const {
  throw OutOfMemory(concat("allocate: no ", bytes, " bytes for '", ledger_.lines()[owner].owner,
                           "' on stream ", name(stream), ": ", ledger_.live_bytes(),
                           " are in use, ", reserved_, " are reserved", describe_limits(limit_),
                           "; make the batch or the model smaller, or use more ranks\n",
                           ledger_.table()));
}

}  // namespace tessera
