// Collectives over messages, for ranks that do not see each other's memory. Every sum is taken
// here, in rank order, from chunks that MPI only carries: MPI's own reductions differ in order
// between versions and sizes and have no 16-bit floats, and nothing wakes a rank inside of them.
#include <algorithm>
#include <cstring>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/mpi/mpi.hpp"
#include "runtime/comm/mpi/mpi_channel.hpp"
#include "runtime/comm/pull.hpp"
#include "tessera/base/checked.hpp"

namespace tessera::comm {
namespace {

class MessageCommunicator final : public Communicator {
 public:
  MessageCommunicator(DeviceContext& context, ShmGroup& group, MpiChannel& channel,
                      const GroupSeat& seat, std::string_view role, StreamId stream)
      : Communicator(context, group.recorder(group.rank()), seat, role, stream),
        group_(group),
        channel_(channel),
        in_(seat.size() > 1 ? channel.out_bytes() : 0),
        inputs_(seat.ranks.size()) {}

 private:
  struct Part {
    MessageCommunicator* self;
    GroupCall call;
    void operator()(Exec&) const { self->run(call); }
  };

  void launch(const Op& op, const GroupCall& call) override {
    Stream(context_, stream()).launch_collective(op, nullptr, Part{this, call});
  }

  void run(const GroupCall& call) {
    recorder_.started(call.seq, stream());
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
        case CollectiveKind::reduce:
          reduce(c, recv);
          break;
        case CollectiveKind::broadcast:
          broadcast(c, recv);
          break;
        case CollectiveKind::all_to_all:
          all_to_all(c, recv);
          break;
        case CollectiveKind::send_recv:
          send_recv(c, recv);
          break;
        case CollectiveKind::barrier:
          break;
      }
    }
    recorder_.done(call.seq, stream());
  }

  int peer(int step) const { return (rank() + step + size()) % size(); }
  std::byte* out(std::size_t at = 0) { return channel_.out() + at; }

  // Fingerprints and their complements go round in log2(size) steps, each rank keeping the largest:
  // equal ones have equal maxima. Doubles as the barrier.
  void agree(const GroupCall& call) {
    std::uint64_t seen[2] = {call.fingerprint, ~call.fingerprint};
    for (int step = 1; step < size(); step *= 2) {
      std::memcpy(out(), seen, sizeof seen);
      channel_.receive(theirs_, sizeof theirs_, peer(-step));
      channel_.send(out(), sizeof seen, peer(step));
      channel_.finish();
      for (int i = 0; i < 2; ++i) seen[i] = std::max(seen[i], theirs_[i]);
    }
    if (seen[0] != ~seen[1]) tell_apart(call);
  }

  // Throws what is wrong, the same on every rank.
  void tell_apart(const GroupCall& call) {
    std::vector<Published> all(static_cast<std::size_t>(size()));
    Published& mine = all[static_cast<std::size_t>(rank())];
    publish(mine, call, 0);
    std::memcpy(out(), &mine, sizeof mine);
    for (int step = 1; step < size(); ++step) {
      channel_.receive(&all[static_cast<std::size_t>(peer(-step))], sizeof mine, peer(-step));
      channel_.send(out(), sizeof mine, peer(step));
    }
    channel_.finish();
    std::vector<const Published*> views;
    for (const Published& p : all) views.push_back(&p);
    const bool sees_all = group_.size() == size();
    group_.world().agree([&] {
      check_agreement(
          views, ranks(), role(),
          sees_all ? std::span(group_.recorders()) : std::span<const FlightRecorder* const>());
    });
  }

  void all_gather(const Collective& c, std::byte* recv) {
    const std::size_t chunk = item_bytes(c);
    std::byte* const mine = recv + static_cast<std::size_t>(rank()) * chunk;
    if (mine != c.send) kernels::copy_bytes(mine, c.send, chunk);
    for (std::size_t at = 0; at < chunk; at += channel_.out_bytes()) {
      const std::size_t bytes = std::min(channel_.out_bytes(), chunk - at);
      kernels::copy_bytes(out(), mine + at, bytes);
      exchange_parts(out(), 0, recv + at, chunk, bytes);
    }
  }

  // Sends `bytes` of `from`, a stride a rank, to each peer, and receives as many from each.
  void exchange_parts(const std::byte* from, std::size_t from_stride, std::byte* to,
                      std::size_t to_stride, std::size_t bytes) {
    for (int step = 1; step < size(); ++step) {
      const auto source = static_cast<std::size_t>(peer(-step));
      const auto target = static_cast<std::size_t>(peer(step));
      channel_.receive(to + source * to_stride, bytes, peer(-step));
      channel_.send(from + target * from_stride, bytes, peer(step));
    }
    channel_.finish();
  }

  // The parts of all ranks lie in the channel; afterwards `result` holds all ranks' for this one,
  // reduced.
  void exchange_and_reduce(std::byte* result, std::size_t bytes, const Collective& c) {
    exchange_parts(out(), bytes, in_.data(), bytes, bytes);
    for (std::size_t r = 0; r < inputs_.size(); ++r)
      inputs_[r] = (static_cast<int>(r) == rank() ? out() : in_.data()) + r * bytes;
    sum(result, bytes, c);
  }
  void sum(std::byte* result, std::size_t bytes, const Collective& c) {
    Exec here;
    Mover(here).reduce(result, inputs_.data(), size(),
                       static_cast<std::int64_t>(bytes / size_bytes(c.dtype)), c);
  }

  // Bytes of each rank's part of a block, whole elements.
  std::size_t part_bytes(DType dtype) const {
    const std::size_t width = size_bytes(dtype);
    return channel_.out_bytes() / inputs_.size() / width * width;
  }

  void reduce_scatter(const Collective& c, std::byte* recv) {
    const auto* send = static_cast<const std::byte*>(c.send);
    const std::size_t chunk = item_bytes(c), block = part_bytes(c.dtype);
    for (std::size_t at = 0; at < chunk; at += block) {
      const std::size_t bytes = std::min(block, chunk - at);
      for (std::size_t r = 0; r < inputs_.size(); ++r)
        kernels::copy_bytes(out(r * bytes), send + r * chunk + at, bytes);
      exchange_and_reduce(recv + at, bytes, c);
    }
  }

  // Each rank sums its part of a block, then all gather the parts. The last parts are padded.
  void all_reduce(const Collective& c, std::byte* recv) {
    const auto* send = static_cast<const std::byte*>(c.send);
    const std::size_t width = size_bytes(c.dtype), total = item_bytes(c), n = inputs_.size();
    const std::size_t block = part_bytes(c.dtype) * n;
    for (std::size_t at = 0; at < total; at += block) {
      const std::size_t bytes = std::min(block, total - at);
      const auto elements = static_cast<std::int64_t>(bytes / width);
      const std::size_t part = static_cast<std::size_t>(ceil_div(elements, size())) * width;
      kernels::copy_bytes(out(), send + at, bytes);
      std::memset(out(bytes), 0, part * n - bytes);
      std::byte* const mine = out(static_cast<std::size_t>(rank()) * part);
      exchange_and_reduce(mine, part, c);
      exchange_parts(mine, 0, out(), part, part);
      kernels::copy_bytes(recv + at, out(), bytes);
    }
  }

  // All parts come to the root, which sums them.
  void reduce(const Collective& c, std::byte* recv) {
    const auto* send = static_cast<const std::byte*>(c.send);
    const std::size_t total = item_bytes(c), block = part_bytes(c.dtype);
    for (std::size_t at = 0; at < total; at += block) {
      const std::size_t bytes = std::min(block, total - at);
      kernels::copy_bytes(out(), send + at, bytes);
      if (rank() != c.root) {
        channel_.send(out(), bytes, c.root);
        channel_.finish();
        continue;
      }
      for (std::size_t r = 0; r < inputs_.size(); ++r) {
        const bool is_own = static_cast<int>(r) == rank();
        if (!is_own) channel_.receive(in_.data() + r * bytes, bytes, static_cast<int>(r));
        inputs_[r] = is_own ? out() : in_.data() + r * bytes;
      }
      channel_.finish();
      sum(recv + at, bytes, c);
    }
  }

  void all_to_all(const Collective& c, std::byte* recv) {
    const auto* send = static_cast<const std::byte*>(c.send);
    const std::size_t chunk = item_bytes(c), block = part_bytes(c.dtype);
    const auto mine = static_cast<std::size_t>(rank());
    for (std::size_t at = 0; at < chunk; at += block) {
      const std::size_t bytes = std::min(block, chunk - at);
      for (std::size_t r = 0; r < inputs_.size(); ++r)
        kernels::copy_bytes(out(r * bytes), send + r * chunk + at, bytes);
      exchange_parts(out(), bytes, recv + at, chunk, bytes);
      kernels::copy_bytes(recv + mine * chunk + at, out(mine * bytes), bytes);
    }
  }

  void send_recv(const Collective& c, std::byte* recv) {
    const auto* send = static_cast<const std::byte*>(c.send);
    const bool is_own = c.root == c.target;
    const std::size_t total = item_bytes(c);
    if (is_own && rank() == c.target && recv != send) kernels::copy_bytes(recv, send, total);
    if (is_own || (rank() != c.root && rank() != c.target)) return;
    for (std::size_t at = 0; at < total; at += channel_.out_bytes()) {
      const std::size_t bytes = std::min(channel_.out_bytes(), total - at);
      if (rank() == c.root) {
        kernels::copy_bytes(out(), send + at, bytes);
        channel_.send(out(), bytes, c.target);
      } else {
        channel_.receive(recv + at, bytes, c.root);
      }
      channel_.finish();
    }
  }

  // Down a tree: with ranks counted from the root, each gets it from the one without its lowest
  // bit, and passes it on to those with one lower bit more.
  void broadcast(const Collective& c, std::byte* recv) {
    const std::size_t total = item_bytes(c);
    const auto* send = static_cast<const std::byte*>(c.send);
    const int me = (rank() - c.root + size()) % size();
    for (std::size_t at = 0; at < total; at += channel_.out_bytes()) {
      const std::size_t bytes = std::min(channel_.out_bytes(), total - at);
      int bit = 1;
      while (bit < size() && (me & bit) == 0) bit *= 2;
      if (me == 0) {
        kernels::copy_bytes(out(), send + at, bytes);
      } else {
        channel_.receive(out(), bytes, peer(-bit));
        channel_.finish();
      }
      for (bit /= 2; bit > 0; bit /= 2)
        if (me + bit < size()) channel_.send(out(), bytes, peer(bit));
      channel_.finish();
      if (recv != send || me != 0) kernels::copy_bytes(recv + at, out(), bytes);
    }
  }

  ShmGroup& group_;  // of this host's ranks: who is alive, and whether all is well
  MpiChannel& channel_;
  std::uint64_t theirs_[2] = {};
  std::vector<std::byte> in_;  // what comes to be summed, rank by rank
  std::vector<const void*> inputs_;
};

}  // namespace

std::unique_ptr<Communicator> make_message_communicator(DeviceContext& context, ShmGroup& group,
                                                        MpiChannel& channel, const GroupSeat& seat,
                                                        std::string_view role, StreamId stream) {
  return std::make_unique<MessageCommunicator>(context, group, channel, seat, role, stream);
}

}  // namespace tessera::comm
