// The moving part of a collective, where ranks read each other's memory: which bytes are staged,
// and what each rank pulls from its peers. Threads and processes share it, and with it the order of
// every sum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "runtime/comm/item_mover.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera::comm {

// Bytes of the whole item, of one rank's chunk for all_gather, reduce_scatter and all_to_all.
inline std::size_t item_bytes(const Collective& c) {
  return static_cast<std::size_t>(c.count) * size_bytes(c.dtype);
}

// How many times `count` the send and the recv side hold in a group of `size` ranks.
inline int send_chunks(CollectiveKind kind, int size) {
  return kind == CollectiveKind::reduce_scatter || kind == CollectiveKind::all_to_all ? size : 1;
}
inline int recv_chunks(CollectiveKind kind, int size) {
  return kind == CollectiveKind::all_gather || kind == CollectiveKind::all_to_all ? size : 1;
}
// Whether rank `rank` sends, and whether it receives.
inline bool sends(const Collective& c, int rank) {
  return !has_root(c.kind) || c.kind == CollectiveKind::reduce || c.root == rank;
}
inline bool receives(const Collective& c, int rank) {
  if (c.kind == CollectiveKind::reduce) return c.root == rank;
  return c.kind != CollectiveKind::send_recv || c.target == rank;
}

// Gives each item of a group, in order, its offset in the staging memory, or kDirect. Depends on
// what all ranks agree on only, so that offsets are equal on all of them.
class StagingPlan {
 public:
  static constexpr std::int64_t kDirect = -1;

  explicit StagingPlan(int size) : size_(size) {}

  std::int64_t next(const Collective& c) {
    if (c.kind == CollectiveKind::all_gather || c.kind == CollectiveKind::reduce_scatter ||
        c.kind == CollectiveKind::barrier)
      return kDirect;
    const std::int64_t offset =
        take(item_bytes(c) * static_cast<std::size_t>(send_chunks(c.kind, size_)));
    address_ = offset == kDirect && c.kind == CollectiveKind::send_recv ? take(64) : kDirect;
    return offset;
  }
  // Of the last item, a send_recv that is not staged: where its root says where it lies, so that
  // the send need not be at the same offset on the target. kDirect where there is no room.
  std::int64_t address() const { return address_; }

 private:
  std::int64_t take(std::size_t bytes) {
    if (bytes > static_cast<std::size_t>(kStagedBytes - used_)) return kDirect;
    return std::exchange(used_, used_ + static_cast<std::int64_t>((bytes + 63) / 64 * 64));
  }

  int size_;
  std::int64_t used_ = 0, address_ = kDirect;
};

// Copies what peers read from the staging memory of this rank.
inline void stage(const ItemMover& mover, std::byte* staging, std::span<const Collective> items,
                  int rank, int size) {
  StagingPlan plan(size);
  for (const Collective& c : items) {
    const std::int64_t offset = plan.next(c);
    if (offset == StagingPlan::kDirect || c.count == 0 || !sends(c, rank)) continue;
    mover.copy(staging + offset, c.send,
               item_bytes(c) * static_cast<std::size_t>(send_chunks(c.kind, size)));
  }
}

// Where rank `rank` of `size` finds its peers' sends. `open(item, index, offset, address)` chooses
// an item and what the StagingPlan says of it, `send(peer)` is then that peer's send side in this
// rank's address space.
template <class T>
concept PeerSource = requires(T source, const Collective& item) {
  source.open(item, std::size_t{}, std::int64_t{}, std::int64_t{});
  { source.send(int{}) } -> std::convertible_to<const std::byte*>;
};

// All items of a group. `inputs` has room for `size` pointers. Each rank starts at its own chunk
// and goes round, so that ranks do not all read from the same peer at once.
template <PeerSource Source>
void pull(const ItemMover& mover, std::span<const Collective> items, int rank, int size,
          std::span<const void*> inputs, Source source) {
  StagingPlan plan(size);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Collective& c = items[i];
    const std::int64_t offset = plan.next(c);
    const std::size_t bytes = item_bytes(c);
    // Where a send side has a chunk for each rank, this one's lies so far behind its beginning.
    const std::size_t mine =
        send_chunks(c.kind, size) > 1 ? static_cast<std::size_t>(rank) * bytes : 0;
    if (bytes == 0 || !receives(c, rank)) continue;
    source.open(c, i, offset, plan.address());
    auto* const recv = static_cast<std::byte*>(c.recv);
    switch (c.kind) {
      case CollectiveKind::all_gather:
      case CollectiveKind::all_to_all:
        for (int step = 0; step < size; ++step) {
          const int peer = (rank + step) % size;
          std::byte* const out = recv + static_cast<std::size_t>(peer) * bytes;
          mover.copy(out, source.send(peer) + mine, bytes);
        }
        break;
      case CollectiveKind::reduce_scatter:
      case CollectiveKind::all_reduce:
      case CollectiveKind::reduce:
        for (int peer = 0; peer < size; ++peer)
          inputs[static_cast<std::size_t>(peer)] = source.send(peer) + mine;
        mover.reduce(recv, inputs.data(), size, c.count, c);
        break;
      case CollectiveKind::broadcast:
      case CollectiveKind::send_recv:
        mover.copy(recv, rank == c.root ? c.send : source.send(c.root), bytes);
        break;
      case CollectiveKind::barrier:
        break;
    }
  }
}

}  // namespace tessera::comm
