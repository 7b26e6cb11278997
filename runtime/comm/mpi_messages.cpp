// Collectives over MPI's own, for ranks that do not see each other's memory. Every sum is taken
// here, in rank order, from chunks that MPI only exchanges: MPI's reductions differ in order
// between versions and sizes, and have no 16-bit floats.
#include <algorithm>
#include <climits>
#include <cstring>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/mpi.hpp"
#include "runtime/comm/pull.hpp"
#include "tessera/base/checked.hpp"

namespace tessera::comm {
namespace {

// Of each of the two exchange buffers. Larger items go through them block by block.
constexpr std::int64_t kBlockBytes = 4 << 20;

// MPI moves bytes; the width keeps counts within int.
MPI_Datatype words(DType dtype) {
  switch (size_bytes(dtype)) {
    case 1:
      return MPI_UINT8_T;
    case 2:
      return MPI_UINT16_T;
    case 4:
      return MPI_UINT32_T;
    default:
      return MPI_UINT64_T;
  }
}

class MessageCommunicator final : public Communicator {
 public:
  MessageCommunicator(DeviceContext& context, MPI_Comm mpi, std::string role, StreamId stream,
                      int rank, int size)
      : Communicator(context, std::move(role), stream, rank, size),
        mpi_(mpi),
        inputs_(static_cast<std::size_t>(size)) {
    if (size == 1) return;
    const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(kBlockBytes, size * 8));
    out_.resize(bytes);
    in_.resize(bytes);
  }

 private:
  struct Part {
    MessageCommunicator* self;
    GroupCall call;
    void operator()(Exec&) const { self->run(call); }
  };

  void launch(const Op& op, std::span<const Collective> items, bool prepared) override {
    for (const Collective& c : items)
      TESSERA_EXPECT(c.count <= INT_MAX, name(c.kind), " '", op.name, "': ", c.count,
                     " elements are more than MPI counts; split the item");
    Stream(context_, stream())
        .launch_joint(op, nullptr, Part{this, GroupCall(*this, op.name, items, prepared)});
  }

  void run(const GroupCall& call) {
    agree(call);
    for (const Collective& c : call.items()) {
      if (c.count == 0) continue;
      auto* const recv = static_cast<std::byte*>(c.recv);
      switch (c.kind) {
        case CollectiveKind::all_gather:
          all_gather(c, recv);
          break;
        case CollectiveKind::reduce_scatter:
          reduce_scatter(c, recv);
          break;
        case CollectiveKind::all_reduce:
          all_reduce(c, recv);
          break;
        case CollectiveKind::broadcast:
          if (rank() == c.root && recv != c.send) kernels::copy_bytes(recv, c.send, item_bytes(c));
          check(MPI_Bcast(recv, static_cast<int>(c.count), words(c.dtype), c.root, mpi_),
                "MPI_Bcast");
          break;
        case CollectiveKind::barrier:
          break;
      }
    }
  }

  // Equal fingerprints have equal maxima, also of their complements. Doubles as the barrier.
  void agree(const GroupCall& call) {
    std::uint64_t seen[2] = {call.fingerprint, ~call.fingerprint};
    check(MPI_Allreduce(MPI_IN_PLACE, seen, 2, MPI_UINT64_T, MPI_MAX, mpi_), "MPI_Allreduce");
    if (seen[0] == ~seen[1]) return;
    std::vector<Published> all(static_cast<std::size_t>(size()));
    std::vector<const Published*> views;
    for (const Published& p : all) views.push_back(&p);
    publish(all[static_cast<std::size_t>(rank())], call, 0);
    check(MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, all.data(), sizeof(Published), MPI_BYTE, mpi_),
          "MPI_Allgather");
    check_agreement(views, role());
  }

  void all_gather(const Collective& c, std::byte* recv) {
    std::byte* const mine = recv + static_cast<std::size_t>(rank()) * item_bytes(c);
    if (mine != c.send) kernels::copy_bytes(mine, c.send, item_bytes(c));
    gather_in_place(recv, c.count, c.dtype);
  }

  void gather_in_place(std::byte* data, std::int64_t count, DType dtype) {
    check(MPI_Allgather(MPI_IN_PLACE, 0, words(dtype), data, static_cast<int>(count), words(dtype),
                        mpi_),
          "MPI_Allgather");
  }

  // Elements of each rank's chunk that fit the exchange buffers.
  std::int64_t block_elements(DType dtype) const {
    return static_cast<std::int64_t>(out_.size() / size_bytes(dtype)) / size();
  }

  // out_ holds n elements for each rank; afterwards `sum` holds all ranks' for this one, added up.
  void exchange_and_sum(std::byte* sum, std::int64_t n, DType dtype) {
    const auto count = static_cast<int>(n);
    check(MPI_Alltoall(out_.data(), count, words(dtype), in_.data(), count, words(dtype), mpi_),
          "MPI_Alltoall");
    for (std::size_t peer = 0; peer < inputs_.size(); ++peer)
      inputs_[peer] = in_.data() + peer * static_cast<std::size_t>(n) * size_bytes(dtype);
    kernels::reduce_peers(sum, inputs_.data(), size(), n, dtype);
  }

  void reduce_scatter(const Collective& c, std::byte* recv) {
    const auto* send = static_cast<const std::byte*>(c.send);
    const std::size_t width = size_bytes(c.dtype), block = block_elements(c.dtype) * width;
    const std::size_t chunk = item_bytes(c);
    for (std::size_t at = 0; at < chunk; at += block) {
      const std::size_t bytes = std::min(block, chunk - at);
      for (std::size_t peer = 0; peer < inputs_.size(); ++peer)
        kernels::copy_bytes(out_.data() + peer * bytes, send + peer * chunk + at, bytes);
      exchange_and_sum(recv + at, static_cast<std::int64_t>(bytes / width), c.dtype);
    }
  }

  // Each rank sums its part of a block, then all gather the parts. The last parts are padded.
  void all_reduce(const Collective& c, std::byte* recv) {
    const auto* send = static_cast<const std::byte*>(c.send);
    const std::size_t width = size_bytes(c.dtype), total = item_bytes(c);
    const auto n = static_cast<std::size_t>(size());
    const std::size_t block = block_elements(c.dtype) * n * width;
    for (std::size_t at = 0; at < total; at += block) {
      const std::size_t bytes = std::min(block, total - at);
      const std::int64_t part = ceil_div(static_cast<std::int64_t>(bytes / width), size());
      const std::size_t part_bytes = static_cast<std::size_t>(part) * width;
      kernels::copy_bytes(out_.data(), send + at, bytes);
      std::memset(out_.data() + bytes, 0, part_bytes * n - bytes);
      exchange_and_sum(out_.data() + static_cast<std::size_t>(rank()) * part_bytes, part, c.dtype);
      gather_in_place(out_.data(), part, c.dtype);
      kernels::copy_bytes(recv + at, out_.data(), bytes);
    }
  }

  MPI_Comm mpi_;
  std::vector<std::byte> out_, in_;  // what goes to and comes from the peers, rank by rank
  std::vector<const void*> inputs_;
};

}  // namespace

std::unique_ptr<Communicator> make_message_communicator(DeviceContext& context, MPI_Comm mpi,
                                                        std::string role, StreamId stream, int rank,
                                                        int size) {
  return std::make_unique<MessageCommunicator>(context, mpi, std::move(role), stream, rank, size);
}

}  // namespace tessera::comm
