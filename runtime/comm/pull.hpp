// The moving part of a collective, where ranks read each other's memory: which bytes are staged,
// and what each rank pulls from its peers. Threads and processes share it, and with it the order of
// every sum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/table.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera::comm {

// Bytes of the whole item, of one rank's chunk for all_gather and reduce_scatter.
inline std::size_t item_bytes(const Collective& c) {
  return static_cast<std::size_t>(c.count) * size_bytes(c.dtype);
}

// Moves bytes by the kernels of the device on which a body runs, on its stream.
class Mover {
 public:
  explicit Mover(Exec& exec) : exec_(exec), kernels_(kernels::kernels_of(exec.driver)) {}

  // The ranges do not overlap unless they are equal; then nothing moves.
  void copy(void* out, const void* in, std::size_t bytes) const {
    if (out != in && bytes != 0) kernels_.copy({out, in, static_cast<std::int64_t>(bytes)}, exec_);
  }
  // `count` elements of all ranks, by the operation and in the dtype of `c`.
  void reduce(void* out, const void* const* inputs, int size, std::int64_t count,
              const Collective& c) const {
    const auto op = c.reduce == ReduceOp::max ? kernels::PeersOp::max : kernels::PeersOp::sum;
    kernels_.reduce_peers({out, inputs, count, size, c.dtype, op}, exec_);
  }

 private:
  Exec& exec_;
  const kernels::Kernels& kernels_;
};

// Gives each item of a group, in order, its offset in the staging memory, or kDirect. Depends on
// what all ranks agree on only, so that offsets are equal on all of them.
class StagingPlan {
 public:
  static constexpr std::int64_t kDirect = -1;

  std::int64_t next(const Collective& c) {
    if (c.kind != CollectiveKind::all_reduce && c.kind != CollectiveKind::broadcast) return kDirect;
    const auto bytes = static_cast<std::int64_t>((item_bytes(c) + 63) / 64 * 64);
    if (bytes > kStagedBytes - used_) return kDirect;
    const std::int64_t offset = used_;
    used_ += bytes;
    return offset;
  }

 private:
  std::int64_t used_ = 0;
};

// Copies what peers read from the staging memory of this rank.
inline void stage(const Mover& mover, std::byte* staging, std::span<const Collective> items,
                  int rank) {
  StagingPlan plan;
  for (const Collective& c : items) {
    const std::int64_t offset = plan.next(c);
    if (offset == StagingPlan::kDirect || c.count == 0) continue;
    if (c.kind == CollectiveKind::broadcast && c.root != rank) continue;
    mover.copy(staging + offset, c.send, item_bytes(c));
  }
}

// Where rank `rank` of `size` finds its peers' sends. `open(item, index, offset)` chooses an item
// and its staging offset, `send(peer)` is then that peer's send side in this rank's address space.
template <class T>
concept PeerSource = requires(T source, const Collective& item) {
  source.open(item, std::size_t{}, std::int64_t{});
  { source.send(int{}) } -> std::convertible_to<const std::byte*>;
};

// All items of a group. `inputs` has room for `size` pointers. Each rank starts at its own chunk
// and goes round, so that ranks do not all read from the same peer at once.
template <PeerSource Source>
void pull(const Mover& mover, std::span<const Collective> items, int rank, int size,
          std::span<const void*> inputs, Source source) {
  StagingPlan plan;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Collective& c = items[i];
    const std::int64_t offset = plan.next(c);
    const std::size_t bytes = item_bytes(c);
    if (bytes == 0) continue;
    source.open(c, i, offset);
    auto* const recv = static_cast<std::byte*>(c.recv);
    switch (c.kind) {
      case CollectiveKind::all_gather:
        for (int step = 0; step < size; ++step) {
          const int peer = (rank + step) % size;
          std::byte* const out = recv + static_cast<std::size_t>(peer) * bytes;
          mover.copy(out, source.send(peer), bytes);
        }
        break;
      case CollectiveKind::reduce_scatter:
        for (int peer = 0; peer < size; ++peer)
          inputs[static_cast<std::size_t>(peer)] =
              source.send(peer) + static_cast<std::size_t>(rank) * bytes;
        mover.reduce(recv, inputs.data(), size, c.count, c);
        break;
      case CollectiveKind::all_reduce:
        for (int peer = 0; peer < size; ++peer)
          inputs[static_cast<std::size_t>(peer)] = source.send(peer);
        mover.reduce(recv, inputs.data(), size, c.count, c);
        break;
      case CollectiveKind::broadcast:
        mover.copy(recv, rank == c.root ? c.send : source.send(c.root), bytes);
        break;
      case CollectiveKind::barrier:
        break;
    }
  }
}

}  // namespace tessera::comm
