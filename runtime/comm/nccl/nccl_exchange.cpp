#include "runtime/comm/nccl/nccl_exchange.hpp"

#include <algorithm>
#include <utility>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/plain_memory.hpp"
#include "runtime/comm/planned_nccl.hpp"
#include "runtime/comm/pull.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera::comm {
namespace {

constexpr std::int64_t kLineBytes = 256, kWideBytes = 16;

kernels::NcclSum nccl_type(DType dtype) {
  return dtype == i32   ? kernels::NcclSum::i32
         : dtype == i64 ? kernels::NcclSum::i64
         : dtype == f32 ? kernels::NcclSum::f32
                        : kernels::NcclSum::f64;
}

}  // namespace

NcclExchange::NcclExchange(DeviceContext& context, NcclWorld& world, NcclWorld::Comm& comm,
                           const GroupSeat& seat, bool sums_by_nccl)
    : world_(world),
      comm_(comm),
      rank_(seat.rank),
      size_(seat.size()),
      sums_by_nccl_(sums_by_nccl),
      inputs_(seat.ranks.size()) {
  if (size_ == 1) return;
  staging_ = plain_memory(context, kStagedBytes);
  landing_ = plain_memory(context, kLandingBytes);
  Memory::of(context).ledger().add_outside(kNcclLanding, kNcclLandingBytes);
}

bool NcclExchange::adds(const Collective& c) const {
  return sums_by_nccl_ && c.reduce == ReduceOp::sum && c.kind != CollectiveKind::reduce &&
         (c.dtype == f32 || c.dtype == f64 || c.dtype == i32 || c.dtype == i64);
}

// Of one call: what goes into NCCL's next group, and what is to be done with what it brings. All
// ranks come to the same groups, since those depend only on what the ranks agree on.
class NcclExchange::Queue {
 public:
  Queue(NcclExchange& self, const GroupCall& call, Exec& exec, bool is_first)
      : self_(self),
        call_(call),
        mover_(exec),
        stream_(exec.native_stream),
        rank_(self.rank_),
        size_(self.size_),
        is_first_(is_first),
        calls_(self.lists_.calls),
        next_calls_(self.lists_.next_calls),
        folds_(self.lists_.folds) {
    calls_.clear();  // what a call that threw has left
    next_calls_.clear();
    folds_.clear();
  }

  void run() {
    stage(mover_, self_.staging_.get(), call_.items(), rank_, size_);
    StagingPlan plan(size_);
    for (const Collective& c : call_.items()) {
      const std::int64_t staged = plan.next(c);
      const std::byte* const send = staged == StagingPlan::kDirect
                                        ? static_cast<const std::byte*>(c.send)
                                        : self_.staging_.get() + staged;
      if (c.kind == CollectiveKind::barrier)
        exchange_byte();
      else if (c.count > 0)
        add(c, send, staged != StagingPlan::kDirect);
    }
    do flush();
    while (!calls_.empty());
  }

 private:
  void add(const Collective& c, const std::byte* send, bool is_staged) {
    const auto bytes = static_cast<std::int64_t>(item_bytes(c));
    switch (c.kind) {
      case CollectiveKind::all_gather:
        return call({Call::gather, send, c.recv, bytes});
      case CollectiveKind::reduce_scatter:
      case CollectiveKind::all_reduce:
      case CollectiveKind::reduce:
        if (!is_staged && !self_.adds(c) && c.kind == CollectiveKind::all_reduce)
          return fold_parts(c, send);
        if (is_staged || !self_.adds(c)) return fold(c, send, 0);
        return call({c.kind == CollectiveKind::all_reduce ? Call::sum : Call::scatter_sum, send,
                     c.recv, c.count, 0, c.dtype});
      case CollectiveKind::broadcast: {
        void* const recv = land(c, is_staged, bytes);
        return call({Call::broadcast, rank_ == c.root ? send : recv, recv, bytes, c.root});
      }
      case CollectiveKind::all_to_all: {
        std::byte* const recv = land(c, is_staged, bytes * size_);
        return call({Call::all_to_all, send, recv, bytes});
      }
      case CollectiveKind::send_recv: {
        void* const recv = land(c, is_staged, bytes);
        if (c.root == c.target) {
          if (c.root == rank_) mover_.copy(recv, send, static_cast<std::size_t>(bytes));
          return;
        }
        if (c.root == rank_) call({Call::send, send, nullptr, bytes, c.target});
        if (c.target == rank_) call({Call::recv, nullptr, recv, bytes, c.root});
        return;
      }
      case CollectiveKind::barrier:
        return;
    }
  }

  // So many elements of each rank fit into the landing memory.
  std::int64_t most_landed(std::int64_t width) const {
    return std::max<std::int64_t>(kLandingBytes / size_ / kLineBytes * kLineBytes / width, 1);
  }

  // An all_reduce, block by block: each rank adds its part of the block, and the parts are
  // gathered with the next block's exchange. So a rank receives 2 (n - 1) / n times what it
  // sends, where a gather of all would bring n - 1 times as much. What is too short for n parts
  // of wide loads is gathered.
  void fold_parts(const Collective& c, const std::byte* send) {
    const auto width = static_cast<std::int64_t>(size_bytes(c.dtype));
    const std::int64_t most = most_landed(width), wide = kWideBytes / width;
    std::int64_t first = 0;
    for (std::int64_t part = 0;; first += part * size_) {
      part = std::min(most, (c.count - first) / size_ / wide * wide);
      if (part == 0) break;
      const std::int64_t bytes = part * width;
      std::byte* const landed = take(bytes * size_);
      const std::byte* const from = send + first * width;
      std::byte* const to = static_cast<std::byte*>(c.recv) + first * width;
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        call({Call::send, from + peer * bytes, nullptr, bytes, peer});
        call({Call::recv, nullptr, landed + peer * bytes, bytes, peer});
      }
      folds_.push_back({&c, to + rank_ * bytes, landed, part, from + rank_ * bytes});
      next_calls_.push_back({Call::gather, to + rank_ * bytes, to, bytes});
    }
    fold(c, send, first);
  }

  // From element `first` on in blocks of as many as have room, the blocks of all ranks one behind
  // another.
  void fold(const Collective& c, const std::byte* send, std::int64_t first) {
    const auto width = static_cast<std::int64_t>(size_bytes(c.dtype));
    const std::int64_t most = most_landed(width);
    for (; first < c.count; first += most) {
      const std::int64_t count = std::min(most, c.count - first), bytes = count * width;
      std::byte* const landed = take(bytes * size_);
      const std::byte* const block = send + first * width;
      const bool adds = c.kind != CollectiveKind::reduce || c.root == rank_;
      const std::byte* own = nullptr;
      if (c.kind == CollectiveKind::all_reduce) {
        call({Call::gather, block, landed, bytes});
      } else {
        for (int peer = 0; peer < size_; ++peer) {
          const bool wants = c.kind != CollectiveKind::reduce || c.root == peer;
          const std::int64_t chunk =
              c.kind == CollectiveKind::reduce_scatter ? peer * c.count * width : 0;
          if (peer == rank_) {
            own = block + chunk;
            continue;
          }
          if (wants) call({Call::send, block + chunk, nullptr, bytes, peer});
          if (adds) call({Call::recv, nullptr, landed + peer * bytes, bytes, peer});
        }
      }
      if (adds)
        folds_.push_back({&c, static_cast<std::byte*>(c.recv) + first * width, landed, count, own});
    }
  }

  // Where what comes for a staged item lies at first: its own memory may be the host's, or what
  // it sends from.
  std::byte* land(const Collective& c, bool is_staged, std::int64_t bytes) {
    if (!is_staged) return static_cast<std::byte*>(c.recv);
    std::byte* const landed = take(bytes);
    if (receives(c, rank_)) folds_.push_back({nullptr, c.recv, landed, bytes, nullptr});
    return landed;
  }

  void exchange_byte() { call({Call::gather, self_.staging_.get(), take(size_), 1}); }

  std::byte* take(std::int64_t bytes) {
    if (used_ + bytes > kLandingBytes) flush();
    return self_.landing_.get() + std::exchange(used_, used_ + round_up(bytes, kLineBytes));
  }

  void call(const Call& c) { calls_.push_back(c); }

  // What all ranks call comes first, so that groups begin alike on all of them.
  void flush() {
    if (!std::ranges::is_partitioned(calls_, Call::is_of_all))
      std::ranges::stable_partition(calls_, Call::is_of_all);
    if (!calls_.empty())
      self_.world_.group(self_.comm_, call_.name, is_first_, [this] {
        for (const Call& c : calls_) self_.world_.check(queue(c));
      });
    for (const Fold& f : folds_) finish(f);
    calls_.clear();
    folds_.clear();
    calls_.swap(next_calls_);
    used_ = 0;
  }

  const char* queue(const Call& c) const {
    void* const comm = self_.comm_.native;
    const kernels::NcclDriver& nccl = self_.world_.nccl();
    switch (c.kind) {
      case Call::gather:
        return nccl.all_gather(c.from, c.to, c.size, comm, stream_);
      case Call::broadcast:
        return nccl.broadcast(c.from, c.to, c.size, c.peer, comm, stream_);
      case Call::all_to_all:
        return nccl.all_to_all(c.from, c.to, c.size, size_, comm, stream_);
      case Call::send:
        return nccl.send(c.from, c.size, c.peer, comm, stream_);
      case Call::recv:
        return nccl.recv(c.to, c.size, c.peer, comm, stream_);
      case Call::scatter_sum:
        return nccl.reduce_scatter(c.from, c.to, c.size, nccl_type(c.dtype), comm, stream_);
      case Call::sum:
        return nccl.all_reduce(c.from, c.to, c.size, nccl_type(c.dtype), comm, stream_);
    }
    return nullptr;
  }

  void finish(const Fold& f) const {
    if (!f.item) return mover_.copy(f.out, f.in, static_cast<std::size_t>(f.count));
    const std::int64_t bytes = f.count * static_cast<std::int64_t>(size_bytes(f.item->dtype));
    for (int peer = 0; peer < size_; ++peer)
      self_.inputs_[static_cast<std::size_t>(peer)] =
          f.own && peer == rank_ ? f.own : f.in + peer * bytes;
    mover_.reduce(f.out, self_.inputs_.data(), size_, f.count, *f.item);
  }

  NcclExchange& self_;
  const GroupCall& call_;
  const ItemMover mover_;
  void* const stream_;
  const int rank_, size_;
  const bool is_first_;
  std::vector<Call>&calls_, &next_calls_;
  std::vector<Fold>& folds_;
  std::int64_t used_ = 0;  // of the landing memory
};

void NcclExchange::run(const GroupCall& call, Exec& exec, bool is_first) {
  Queue(*this, call, exec, is_first).run();
}

}  // namespace tessera::comm
