#include "runtime/comm/processes/shared_sends.hpp"

#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::comm {

SharedSends::Span SharedSends::direct(const Collective& c) const {
  const auto bytes = static_cast<std::int64_t>(item_bytes(c));
  const auto* begin = static_cast<const std::byte*>(c.send);
  const auto* recv = static_cast<const std::byte*>(c.recv);
  const bool is_own_chunk = c.kind == CollectiveKind::all_gather && begin == recv + rank_ * bytes;
  if (is_own_chunk) begin = recv;
  const int chunks = is_own_chunk ? size_ : send_chunks(c.kind, size_);
  Span span{group_.find(begin, bytes * chunks), 0, is_own_chunk ? bytes : 0};
  if (span.mapping)
    span.offset = begin - span.mapping->bases[static_cast<std::size_t>(group_.rank())];
  return span;
}

void SharedSends::expect_readable(const char* group, std::span<const Collective> items) const {
  StagingPlan plan(size_);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Collective& c = items[i];
    const bool is_direct = plan.next(c) == StagingPlan::kDirect;
    const bool is_read = c.kind != CollectiveKind::send_recv || c.root == rank_;
    TESSERA_EXPECT(!is_direct || !is_read || c.count == 0 || c.kind == CollectiveKind::barrier ||
                       direct(c).mapping,
                   name(c.kind), " '", group, "', item ", i, ": send ", c.send,
                   " is not in memory that other processes can read; allocate it by "
                   "World::allocate_symmetric");
  }
}

std::uint64_t SharedSends::layout_hash(std::span<const Collective> items) const {
  StagingPlan plan(size_);
  std::uint64_t hash = 0;
  for (const Collective& c : items) {
    if (plan.next(c) != StagingPlan::kDirect || c.count == 0) continue;
    if (c.kind == CollectiveKind::send_recv) continue;  // its root's alone
    const Span at = direct(c);
    if (!at.mapping) continue;  // a barrier
    hash = fnv1a(at.mapping->number, hash);
    hash = fnv1a(static_cast<std::uint64_t>(at.offset), hash);
    hash = fnv1a(static_cast<std::uint64_t>(at.stride), hash);
  }
  return hash;
}

}  // namespace tessera::comm
