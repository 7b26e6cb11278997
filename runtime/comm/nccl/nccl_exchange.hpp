// Collectives over NCCL: one group of its calls for each submitted operation, queued on the stream.
//
//   small (staged)   copy to staging ─ exchange ─ fold or copy to where it belongs
//   a large sum      of f32, f64, i32, i64: NCCL's own
//   other sums       in blocks: each peer's part to who adds it ─ fold in rank order; of an
//                    all_reduce each rank adds a part of the block ─ gather the parts
//   the rest         NCCL's all-gathers, broadcasts, sends and receives, of bytes
//
// What is folded has the bits of threads: NCCL adds 16-bit values in another order, and rounds at
// each hop, and its maximum loses NaN. `control` is all folds.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/comm/nccl/nccl_world.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/device/op.hpp"

namespace tessera::comm {

class NcclExchange {
 public:
  // `sums_by_nccl`: large ones of f32, f64 and integers. A group of one rank never runs.
  NcclExchange(DeviceContext& context, NcclWorld& world, NcclWorld::Comm& comm,
               const GroupSeat& seat, bool sums_by_nccl);
  NcclExchange(const NcclExchange&) = delete;
  NcclExchange& operator=(const NcclExchange&) = delete;

  // Queues the call on the stream of `exec`. `is_first`: peers may still be on their way.
  void run(const GroupCall& call, Exec& exec, bool is_first);

 private:
  class Queue;
  bool adds(const Collective& c) const;  // NCCL does

  // NCCL's calls are kept until the group is whole, so that what only copies is queued before it.
  struct Call {
    enum Kind : std::uint8_t { gather, broadcast, all_to_all, send, recv, scatter_sum, sum } kind;
    const void* from;
    void* to;
    std::int64_t size;  // bytes; of sums elements
    int peer = 0;
    DType dtype = DType::f32;
    static bool is_of_all(const Call& c) { return c.kind != send && c.kind != recv; }
  };
  struct Fold {  // copies where `item` is null
    const Collective* item;
    void* out;
    const std::byte* in;   // of each rank, one behind another
    std::int64_t count;    // elements; bytes of a copy
    const std::byte* own;  // this rank's, which nobody sends; null: it is in `in`
  };
  // What `Queue` fills; kept from call to call, for its memory.
  struct Lists {
    std::vector<Call> calls, next_calls;  // of the next group, and of the one behind its folds
    std::vector<Fold> folds;
  };

  NcclWorld& world_;
  NcclWorld::Comm& comm_;
  const int rank_, size_;
  const bool sums_by_nccl_;
  std::shared_ptr<std::byte> staging_, landing_;
  Lists lists_;
  std::vector<const void*> inputs_;  // of one sum
};

}  // namespace tessera::comm
