// One real rank of a world whose other ranks do not exist: the same program, streams and buffers,
// nothing on a wire. See World::emulated for what the values are.
#include <array>
#include <vector>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/plain_memory.hpp"
#include "runtime/comm/planned_nccl.hpp"
#include "runtime/comm/pull.hpp"
#include "runtime/comm/world_state.hpp"
#include "tessera/base/error.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera {
namespace {

using comm::GroupCall;

// The copies of a grouped call, in few launches: a wire that costs no host time.
class Copies {
 public:
  explicit Copies(Exec& exec) : exec_(exec), kernels_(kernels::kernels_of(exec.driver)) {}
  Copies(const Copies&) = delete;
  ~Copies() { flush(); }

  void add(std::byte* out, const std::byte* in, std::int64_t bytes) {
    if (out == in || bytes == 0) return;
    if (count_ == kernels::kMostCopies) flush();
    copies_[static_cast<std::size_t>(count_++)] = {out, in, bytes};
  }

 private:
  void flush() {
    if (count_ > 0) kernels_.copies({copies_.data(), count_}, exec_);
    count_ = 0;
  }

  Exec& exec_;
  const kernels::Kernels& kernels_;
  std::int32_t count_ = 0;
  std::array<kernels::CopyArgs, kernels::kMostCopies> copies_;
};

// This rank's chunk, and for each peer a chunk of its own, finite where ours is:
// recv[peer][i] = send[(i + turn) mod count]. Turns go by 16 bytes where they can, for wide copies.
void gather(Copies& copies, const Collective& c, int rank, int size) {
  const auto* send = static_cast<const std::byte*>(c.send);
  auto* recv = static_cast<std::byte*>(c.recv);
  const auto width = static_cast<std::int64_t>(size_bytes(c.dtype));
  const std::int64_t wide = 16 / width, bytes = c.count * width;
  const std::int64_t step = c.count % wide == 0 && c.count / wide >= size ? wide : 1;
  for (int peer = 0; peer < size; ++peer) {
    const std::int64_t turn = (peer + size - rank) % size * step % c.count;
    const std::int64_t head = (c.count - turn) * width;
    std::byte* const out = recv + peer * bytes;
    copies.add(out, send + turn * width, head);
    copies.add(out + head, send, bytes - head);
  }
}

// Over ranks that all hold the same, the sum is that times their number, and the largest is that.
void combine(Exec& exec, std::byte* out, const std::byte* in, const Collective& c, int size) {
  if (c.reduce == ReduceOp::max || c.dtype == DType::boolean)
    return comm::ItemMover(exec).copy(out, in, comm::item_bytes(c));
  kernels::ScalarArgs times{};
  times.out = out;
  times.in = in;
  times.scalar = size;
  times.count = c.count;
  times.op = kernels::BinaryOp::mul;
  times.dtype = c.dtype;
  kernels::kernels_of(exec.driver).scalar(times, exec);
}

// What a peer that is not there would have sent.
void zero(Exec& exec, void* out, const Collective& c) {
  kernels::FillArgs fill{};
  fill.out = out;
  fill.count = c.count;
  fill.dtype = c.dtype;
  kernels::kernels_of(exec.driver).fill(fill, exec);
}

class EmulatedCommunicator final : public Communicator {
 public:
  // `nccl_bytes` stand in a plan from the first call on, as NCCL takes them then.
  EmulatedCommunicator(DeviceContext& context, FlightRecorder& recorder, const GroupSeat& seat,
                       std::string_view role, StreamId stream, std::int64_t nccl_bytes)
      : Communicator(context, recorder, seat, role, stream), nccl_bytes_(nccl_bytes) {}

 private:
  struct Part {
    GroupCall call;
    FlightRecorder* recorder;
    int rank, size;
    void operator()(Exec& exec) const {
      recorder->started(call.seq, exec.stream);
      {
        Copies copies(exec);
        for (const Collective& c : call.items())
          if (c.count > 0) run(exec, copies, c, rank, size);
      }
      recorder->done(call.seq, exec.stream);
    }
  };

  void launch(const Op& op, const GroupCall& call) override {
    if (nccl_bytes_ > 0)
      Memory::of(context_).ledger().add_outside(comm::kAssumedNccl, std::exchange(nccl_bytes_, 0));
    Stream(context_, stream())
        .launch_collective(op, nullptr, Part{call, &recorder_, rank(), size()});
  }

  static void run(Exec& exec, Copies& copies, const Collective& c, int rank, int size) {
    const auto bytes = static_cast<std::int64_t>(comm::item_bytes(c));
    const auto* send = static_cast<const std::byte*>(c.send);
    auto* recv = static_cast<std::byte*>(c.recv);
    switch (c.kind) {
      case CollectiveKind::all_gather:
        gather(copies, c, rank, size);
        break;
      case CollectiveKind::reduce_scatter:
        combine(exec, recv, send + rank * bytes, c, size);
        break;
      case CollectiveKind::all_reduce:
        combine(exec, recv, send, c, size);
        break;
      case CollectiveKind::reduce:
        if (c.root == rank) combine(exec, recv, send, c, size);
        break;
      case CollectiveKind::broadcast:  // the root decides as this rank does
        copies.add(recv, send, bytes);
        break;
      case CollectiveKind::all_to_all:  // each peer sends what it gets
        copies.add(recv, send, bytes * size);
        break;
      case CollectiveKind::send_recv:
        if (c.target == rank && c.root == rank) copies.add(recv, send, bytes);
        if (c.target == rank && c.root != rank) zero(exec, recv, c);
        break;
      case CollectiveKind::barrier:
        break;
    }
  }

  std::int64_t nccl_bytes_;
};

class EmulatedGroup final : public World::Backend::Group {
 public:
  EmulatedGroup(comm::PlainArena& arena, const comm::PlannedNccl& nccl, int size)
      : arena_(arena), nccl_(nccl), size_(size) {}

  std::unique_ptr<Communicator> make(DeviceContext& context, const GroupSeat& seat,
                                     std::string_view role, StreamId stream) override {
    if (nccl_.is_planned(size_))
      Memory::of(context).ledger().add_outside(comm::kNcclLanding, comm::kNcclLandingBytes);
    return std::make_unique<EmulatedCommunicator>(context, recorder_, seat, role, stream,
                                                  nccl_.bytes_of(role, seat.size()));
  }
  std::shared_ptr<SymmetricMemory> allocate(DeviceContext& context, std::int64_t bytes,
                                            std::string_view) override {
    return arena_.allocate(context, nccl_.whole_granules(bytes, size_));
  }
  FlightRecorder& recorder() noexcept override { return recorder_; }
  bool has_windows() const noexcept override { return nccl_.has_windows(size_); }

 private:
  comm::PlainArena& arena_;
  const comm::PlannedNccl& nccl_;
  const int size_;
  FlightRecorder recorder_;
};

class EmulatedBackend final : public World::Backend {
 public:
  explicit EmulatedBackend(const comm::PlannedNccl& nccl) : nccl_(nccl) {}
  Group* group(DeviceContext&, const GroupSeat& seat) override {
    if (seat.ranks.empty()) return nullptr;
    return groups_.emplace_back(std::make_unique<EmulatedGroup>(arena_, nccl_, seat.size())).get();
  }
  void commit() noexcept override {}
  void abandon(const std::string&) noexcept override {}
  void fail(const std::string& reason) noexcept override {
    if (reason_.empty()) reason_ = reason;
  }
  std::string reason() const override { return reason_; }
  void rejoin(DeviceContext&, std::span<double>) override { reason_.clear(); }
  std::string leave() noexcept override { return ""; }

 private:
  const comm::PlannedNccl nccl_;
  std::string reason_;
  comm::PlainArena arena_;
  std::vector<std::unique_ptr<EmulatedGroup>> groups_;
};

}  // namespace

World World::single(const WorldOptions& options) {
  return World(
      std::make_unique<State>(WorldKind::single, 0, 1, options, threads_per_rank(options, 1),
                              std::make_unique<EmulatedBackend>(comm::PlannedNccl(options))));
}

World World::emulated(int rank, int size, const WorldOptions& options) {
  TESSERA_EXPECT(size >= 1 && rank >= 0 && rank < size, "World::emulated: rank ", rank, " of ",
                 size, " ranks; give 0 <= rank < size");
  return World(std::make_unique<State>(
      WorldKind::emulated, rank, size, options, threads_per_rank(options, 1),
      std::make_unique<EmulatedBackend>(comm::PlannedNccl(options))));
}

}  // namespace tessera
