// Collectives over MPI's own, for ranks that do not see each other's memory. Every sum is taken
// here, in rank order, from chunks that MPI only exchanges: MPI's reductions differ in order
// between versions and sizes, and have no 16-bit floats.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <thread>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/mpi.hpp"
#include "runtime/comm/pull.hpp"
#include "tessera/base/checked.hpp"

namespace tessera::comm {
namespace {

// Of each of the two exchange buffers. Larger items go through them block by block.
constexpr std::int64_t kBlockBytes = 4 << 20;

// Then a waiting thread gives its core away for longer than a time slice takes to come round.
constexpr int kYields = 1000;

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
  MessageCommunicator(DeviceContext& context, SharedWorld& world, MPI_Comm mpi, std::string role,
                      StreamId stream, int rank, int size)
      : Communicator(context, world.recorder(world.rank()), std::move(role), stream, rank, size),
        world_(world),
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

  void check_transport(const char* group, std::span<const Collective> items) const override {
    for (const Collective& c : items)
      TESSERA_EXPECT(c.count <= INT_MAX, name(c.kind), " '", group, "': ", c.count,
                     " elements are more than MPI counts; split the item");
  }

  void launch(const Op& op, const GroupCall& call) override {
    Stream(context_, stream()).launch_joint(op, nullptr, Part{this, call});
  }

  void run(const GroupCall& call) {
    recorder_.started(call.number, stream());
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
    recorder_.done(call.number, stream());
  }

  // Fingerprints and their complements go round in log2(size) steps, each rank keeping the largest:
  // equal ones have equal maxima. Doubles as the barrier.
  void agree(const GroupCall& call) {
    seen_[0] = call.fingerprint;
    seen_[1] = ~call.fingerprint;
    for (int step = 1; step < size(); step *= 2) {
      exchange(seen_, theirs_, sizeof seen_, (rank() + step) % size(),
               (rank() - step + size()) % size());
      for (int i = 0; i < 2; ++i) seen_[i] = std::max(seen_[i], theirs_[i]);
    }
    if (seen_[0] == ~seen_[1]) return;
    all_.resize(static_cast<std::size_t>(size()));
    publish(all_[static_cast<std::size_t>(rank())], call, 0);
    for (int step = 1; step < size(); ++step) {
      const int from = (rank() - step + size()) % size();
      exchange(&all_[static_cast<std::size_t>(rank())], &all_[static_cast<std::size_t>(from)],
               sizeof(Published), (rank() + step) % size(), from);
    }
    std::vector<const Published*> views;
    for (const Published& p : all_) views.push_back(&p);
    const bool sees_all = world_.size() == size();
    world_.agree([&] {
      check_agreement(
          views, role(),
          sees_all ? std::span(world_.recorders()) : std::span<const FlightRecorder* const>());
    });
  }

  // Polls, because nothing wakes a thread inside MPI when a peer never comes. All that may keep a
  // rank from coming shows here: the collectives behind it are begun by all or by none.
  void exchange(const void* out, void* in, std::size_t bytes, int to, int from) {
    MPI_Request requests[2];
    const auto n = static_cast<int>(bytes);
    check(MPI_Irecv(in, n, MPI_BYTE, from, 0, mpi_, &requests[0]), "MPI_Irecv");
    check(MPI_Isend(out, n, MPI_BYTE, to, 0, mpi_, &requests[1]), "MPI_Isend");
    for (int look = 0;; ++look) {
      int done = 0;
      check(MPI_Testall(2, requests, &done, MPI_STATUSES_IGNORE), "MPI_Testall");
      if (done) return;
      if (world_.is_aborted()) {
        give_up(requests);
        world_.expect_fine();
      }
      if (look < kYields)
        sched_yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  // MPI must not write to memory that its owner, on the way out, gives back. A send as small as
  // ours needs its memory no more.
  static void give_up(MPI_Request (&requests)[2]) {
    if (requests[0] != MPI_REQUEST_NULL) {
      MPI_Cancel(&requests[0]);
      MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
    }
    if (requests[1] != MPI_REQUEST_NULL) MPI_Request_free(&requests[1]);
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

  // out_ holds n elements for each rank; afterwards `result` holds all ranks' for this one,
  // reduced.
  void exchange_and_reduce(std::byte* result, std::int64_t n, const Collective& c) {
    const auto count = static_cast<int>(n);
    check(MPI_Alltoall(out_.data(), count, words(c.dtype), in_.data(), count, words(c.dtype), mpi_),
          "MPI_Alltoall");
    for (std::size_t peer = 0; peer < inputs_.size(); ++peer)
      inputs_[peer] = in_.data() + peer * static_cast<std::size_t>(n) * size_bytes(c.dtype);
    Exec here;
    Mover(here).reduce(result, inputs_.data(), size(), n, c);
  }

  void reduce_scatter(const Collective& c, std::byte* recv) {
    const auto* send = static_cast<const std::byte*>(c.send);
    const std::size_t width = size_bytes(c.dtype), block = block_elements(c.dtype) * width;
    const std::size_t chunk = item_bytes(c);
    for (std::size_t at = 0; at < chunk; at += block) {
      const std::size_t bytes = std::min(block, chunk - at);
      for (std::size_t peer = 0; peer < inputs_.size(); ++peer)
        kernels::copy_bytes(out_.data() + peer * bytes, send + peer * chunk + at, bytes);
      exchange_and_reduce(recv + at, static_cast<std::int64_t>(bytes / width), c);
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
      exchange_and_reduce(out_.data() + static_cast<std::size_t>(rank()) * part_bytes, part, c);
      gather_in_place(out_.data(), part, c.dtype);
      kernels::copy_bytes(recv + at, out_.data(), bytes);
    }
  }

  SharedWorld& world_;  // of this host's ranks: who is alive, and whether all is well
  MPI_Comm mpi_;
  std::uint64_t seen_[2] = {}, theirs_[2] = {};
  std::vector<Published> all_;       // of a disagreement
  std::vector<std::byte> out_, in_;  // what goes to and comes from the peers, rank by rank
  std::vector<const void*> inputs_;
};

}  // namespace

std::unique_ptr<Communicator> make_message_communicator(DeviceContext& context, SharedWorld& world,
                                                        MPI_Comm mpi, std::string role,
                                                        StreamId stream, int rank, int size) {
  return std::make_unique<MessageCommunicator>(context, world, mpi, std::move(role), stream, rank,
                                               size);
}

}  // namespace tessera::comm
