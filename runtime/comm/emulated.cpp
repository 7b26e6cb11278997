// One real rank of a world whose other ranks do not exist: the same program, streams and buffers,
// nothing on a wire. See World::emulated for what the values are.
#include <algorithm>
#include <cstring>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/plain_memory.hpp"
#include "runtime/comm/pull.hpp"
#include "runtime/comm/world_state.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

using comm::GroupCall;

// out[i] = in[(i + turn) mod count]: finite where `in` is, and a chunk of its own for each `turn`.
void rotate_chunk(const comm::Mover& mover, std::byte* out, const std::byte* in, std::int64_t count,
                  std::int64_t turn, std::size_t width) {
  const auto head = static_cast<std::size_t>((count - turn) % count) * width;
  const auto bytes = static_cast<std::size_t>(count) * width;
  mover.copy(out, in + (bytes - head), head);
  mover.copy(out + head, in, bytes - head);
}

// Over ranks that all hold the same, the sum is that times their number, and the largest is that.
void combine(Exec& exec, std::byte* out, const std::byte* in, const Collective& c, int size) {
  if (c.reduce == ReduceOp::max || c.dtype == DType::boolean)
    return comm::Mover(exec).copy(out, in, comm::item_bytes(c));
  kernels::ScalarArgs times{};
  times.out = out;
  times.in = in;
  times.scalar = size;
  times.count = c.count;
  times.op = kernels::BinaryOp::mul;
  times.dtype = c.dtype;
  kernels::kernels_of(exec.driver).elementwise.scalar(times, exec);
}

class EmulatedCommunicator final : public Communicator {
 public:
  EmulatedCommunicator(DeviceContext& context, FlightRecorder& recorder, std::string role,
                       StreamId stream, int rank, int size)
      : Communicator(context, recorder, std::move(role), stream, rank, size) {}

 private:
  struct Part {
    GroupCall call;
    FlightRecorder* recorder;
    int rank, size;
    void operator()(Exec& exec) const {
      recorder->started(call.number, exec.stream);
      for (const Collective& c : call.items())
        if (c.count > 0) run(exec, c, rank, size);
      recorder->done(call.number, exec.stream);
    }
  };

  void launch(const Op& op, const GroupCall& call) override {
    Stream(context_, stream()).launch_joint(op, nullptr, Part{call, &recorder_, rank(), size()});
  }

  static void run(Exec& exec, const Collective& c, int rank, int size) {
    const comm::Mover mover(exec);
    const std::size_t bytes = comm::item_bytes(c);
    const auto* send = static_cast<const std::byte*>(c.send);
    auto* recv = static_cast<std::byte*>(c.recv);
    const std::size_t mine = static_cast<std::size_t>(rank) * bytes;
    switch (c.kind) {
      case CollectiveKind::all_gather:
        for (int peer = 0; peer < size; ++peer) {
          std::byte* out = recv + static_cast<std::size_t>(peer) * bytes;
          if (peer != rank)
            rotate_chunk(mover, out, send, c.count, (peer + size - rank) % size % c.count,
                         size_bytes(c.dtype));
          else
            mover.copy(out, send, bytes);
        }
        break;
      case CollectiveKind::reduce_scatter:
        combine(exec, recv, send + mine, c, size);
        break;
      case CollectiveKind::all_reduce:
        combine(exec, recv, send, c, size);
        break;
      case CollectiveKind::broadcast:  // the root decides as this rank does
        mover.copy(recv, send, bytes);
        break;
      case CollectiveKind::barrier:
        break;
    }
  }
};

class EmulatedBackend final : public World::Backend {
 public:
  std::unique_ptr<Communicator> make(DeviceContext& context, std::string role, StreamId stream,
                                     int rank, int size) override {
    return std::make_unique<EmulatedCommunicator>(context, recorder_, std::move(role), stream, rank,
                                                  size);
  }
  std::shared_ptr<SymmetricMemory> allocate(DeviceContext& context, std::int64_t bytes) override {
    return arena_.allocate(context, bytes);
  }
  FlightRecorder& recorder() noexcept override { return recorder_; }
  void fail(const std::string& reason) noexcept override {
    if (reason_.empty()) reason_ = reason;
  }
  std::string reason() const override { return reason_; }
  void meet_again(DeviceContext&, std::span<double>) override { reason_.clear(); }
  void leave() noexcept override {}

 private:
  std::string reason_;
  FlightRecorder recorder_;
  comm::PlainArena arena_;
};

}  // namespace

World World::single(const WorldOptions& options) {
  return World(std::make_unique<State>(WorldKind::single, 0, 1, options,
                                       threads_per_rank(options, 1),
                                       std::make_unique<EmulatedBackend>()));
}

World World::emulated(int rank, int size, const WorldOptions& options) {
  TESSERA_EXPECT(size >= 1 && rank >= 0 && rank < size, "World::emulated: rank ", rank, " of ",
                 size, " ranks; give 0 <= rank < size");
  return World(std::make_unique<State>(WorldKind::emulated, rank, size, options,
                                       threads_per_rank(options, 1),
                                       std::make_unique<EmulatedBackend>()));
}

}  // namespace tessera
