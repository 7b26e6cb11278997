// Collectives of ranks that do not all see each other's memory: messages go between hosts, and
// within one its ranks share memory. Every sum is taken here, in a set order, from parts that MPI
// only carries: MPI's own reductions differ in order between versions and sizes and have no 16-bit
// floats, and nothing wakes a rank inside of them.
//
//   all_gather       out ──── message ────► in      all ranks there meet, and copy
//   reduce_scatter   sum of a host's sends ──► in   its rank there adds the hosts' sums
//
// Each part goes once to each other host, between a rank and its partner there (host_layout.hpp).
// Where every rank is alone on its host, or is taken to be, this is a flat exchange of messages.
#include <algorithm>
#include <cstring>

#include "kernels/kernel_table.hpp"
#include "runtime/comm/agreement.hpp"
#include "runtime/comm/mpi/mpi.hpp"
#include "runtime/comm/mpi/mpi_channel.hpp"
#include "runtime/comm/processes/host_layout.hpp"
#include "runtime/comm/processes/shared_sends.hpp"
#include "runtime/comm/pull.hpp"
#include "tessera/detail/base/checked.hpp"

namespace tessera::comm {
namespace {

// What each rank has of an item: of a block of a chunk, or of a block that is dealt out among all.
struct Parts {
  std::size_t begin, stride;  // of rank 0, and from one to the next
  std::size_t most;           // bytes of one
  std::size_t end;            // where the last ones are cut off
  int only = -1;              // the one rank that has any

  std::size_t at(int rank) const { return begin + static_cast<std::size_t>(rank) * stride; }
  std::size_t bytes(int rank) const {
    const bool has_none = at(rank) >= end || (only >= 0 && only != rank);
    return has_none ? 0 : std::min(most, end - at(rank));
  }
};

// y = x + beta y, in f32 or wider.
void axpy(void* y, DType y_dtype, const void* x, DType x_dtype, double beta, std::int64_t count,
          Exec& exec) {
  kernels::cpu_kernels().axpby({.y = y,
                                .x = x,
                                .alpha = 1,
                                .beta = beta,
                                .count = count,
                                .shape = {},
                                .y_strides = {},
                                .x_strides = {},
                                .y_dtype = y_dtype,
                                .x_dtype = x_dtype,
                                .ndim = 0},
                               exec);
}

class MessageCommunicator final : public Communicator {
 public:
  MessageCommunicator(DeviceContext& context, const MessageSetup& setup, const GroupSeat& seat,
                      std::string_view role, StreamId stream)
      : Communicator(context, setup.group.recorder(setup.group.rank()), seat, role, stream),
        group_(setup.group),
        number_(setup.number),
        layout_(setup.layout),
        channel_(setup.channel),
        exchange_(setup.exchange),
        block_(channel_.out_bytes() / static_cast<std::size_t>(layout_.most_served() + 1) / 64 *
               64),
        sends_(group_, number_, rank(), size()),
        inputs_(seat.ranks.size()) {}

 private:
  struct Part {
    MessageCommunicator* self;
    GroupCall call;
    void operator()(Exec& exec) const { self->run(call, exec); }
  };

  // What of an item this host's ranks send, while it is run.
  struct Item {
    const Collective& c;
    SharedSends::Span span;
    Exec& exec;
  };

  void check_transport(const char* group, std::span<const Collective> items) const override {
    if (!layout_.is_flat()) sends_.expect_readable(group, items);
  }

  void launch(const Op& op, const GroupCall& call) override {
    Stream(context_, stream()).launch_collective(op, nullptr, Part{this, call});
  }

  void run(const GroupCall& call, Exec& exec) {
    recorder_.started(call.seq, stream());
    if (!layout_.is_alone())
      stage(ItemMover(exec), group_.role(group_.rank(), number_).staging, call.items(), rank(),
            size());
    agree(call);
    meet();  // all have come, so it takes no time: what they have staged is seen from here on
    StagingPlan plan(size());
    for (const Collective& c : call.items()) {
      const std::int64_t staged = plan.next(c);
      if (c.count != 0)
        run({c, layout_.is_alone() ? SharedSends::Span{} : sends_.span(c, staged), exec});
    }
    meet();
    recorder_.done(call.seq, stream());
  }

  void run(const Item& item) {
    const Collective& c = item.c;
    auto* const recv = static_cast<std::byte*>(c.recv);
    switch (c.kind) {
      case CollectiveKind::all_gather:
        return all_gather(c, recv);
      case CollectiveKind::reduce_scatter:
        return reduce_scatter(item, recv);
      case CollectiveKind::all_reduce:
        return all_reduce(item, recv);
      case CollectiveKind::reduce:
        return reduce(item, recv);
      case CollectiveKind::broadcast:
        return broadcast(c, recv);
      case CollectiveKind::all_to_all:
        return all_to_all(c, recv);
      case CollectiveKind::send_recv:
        return send_recv(c, recv);
      case CollectiveKind::barrier:
        break;
    }
  }

  // The ranks of this host. What they have written before is seen by all afterwards.
  void meet() {
    if (!layout_.is_alone()) group_.meet(number_, role().c_str(), 0);
  }

  int peer(int step) const { return (rank() + step + size()) % size(); }
  std::byte* out(std::size_t at = 0) { return channel_.out() + at; }
  // What `rank`, of this host, sends, and behind it what it receives.
  std::byte* exchange(int rank) const {
    return exchange_[static_cast<std::size_t>(layout_.number(rank))];
  }
  std::byte* in(int rank, int slot) const {
    return exchange(rank) + channel_.out_bytes() + static_cast<std::size_t>(slot) * block_;
  }

  // Fingerprints and their complements go round in log2(size) steps, each rank keeping the largest:
  // equal ones have equal maxima. Doubles as the barrier.
  void agree(const GroupCall& call) {
    const std::uint64_t layout = layout_.is_flat() ? 0 : sends_.layout_hash(call.items());
    const std::uint64_t own = mix(call.fingerprint, layout);
    std::uint64_t seen[2] = {own, ~own};
    for (int step = 1; step < size(); step *= 2) {
      std::memcpy(out(), seen, sizeof seen);
      channel_.receive(theirs_, sizeof theirs_, peer(-step));
      channel_.send(out(), sizeof seen, peer(step));
      channel_.finish();
      for (int i = 0; i < 2; ++i) seen[i] = std::max(seen[i], theirs_[i]);
    }
    if (seen[0] != ~seen[1]) tell_apart(call, layout);
  }

  // Throws what is wrong, the same on every rank.
  void tell_apart(const GroupCall& call, std::uint64_t layout) {
    std::vector<Published> all(static_cast<std::size_t>(size()));
    Published& mine = all[static_cast<std::size_t>(rank())];
    publish(mine, call, layout);
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

  // Bytes of each rank's part of a block, whole elements of `c`, which may travel wider.
  std::size_t part_bytes(const Collective& c) const {
    return block_ / size_bytes(wire_dtype(c)) * size_bytes(c.dtype);
  }

  void all_gather(const Collective& c, std::byte* recv) {
    const std::size_t chunk = item_bytes(c),
                      block = layout_.is_flat() ? channel_.out_bytes() : block_;
    for (std::size_t at = 0; at < chunk; at += block)
      gather_parts(recv, static_cast<const std::byte*>(c.send) + at,
                   {at, chunk, std::min(block, chunk - at), SIZE_MAX});
  }

  // `mine` comes to this rank's chunk of every rank's `recv`.
  void gather_parts(std::byte* recv, const std::byte* mine, const Parts& parts) {
    kernels::copy_bytes(out(), mine, parts.bytes(rank()));
    for (const int r : layout_.served()) {
      std::byte* const to = layout_.is_alone() ? recv + parts.at(r) : in(rank(), layout_.slot(r));
      receive(to, parts.bytes(r), r);
    }
    for (int h = 0; h < layout_.hosts(); ++h)
      if (h != layout_.own_host()) send(out(), parts.bytes(rank()), layout_.partner(h, rank()));
    channel_.finish();
    meet();
    for (int step = 0; step < size(); ++step) {
      const int r = peer(step);
      if (r == rank() || !layout_.is_alone())
        kernels::copy_bytes(recv + parts.at(r), gathered(r), parts.bytes(r));
    }
    meet();
  }
  // Where the part of `r` lies on this host.
  const std::byte* gathered(int r) {
    const int keeper = layout_.partner(layout_.own_host(), r);
    return keeper == r ? exchange(r) : in(keeper, layout_.slot(r));
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

  // Partial sums of 16-bit floats stay in f32 until the last one is added.
  DType wire_dtype(const Collective& c) const {
    const bool rounds =
        c.reduce == ReduceOp::sum && (c.dtype == DType::bf16 || c.dtype == DType::f16);
    return rounds && !layout_.is_flat() ? DType::f32 : c.dtype;
  }

  // What this host's ranks send at [at, at + bytes), combined in their order.
  void reduce_here(void* result, const Item& item, std::size_t at, std::size_t bytes) {
    const std::span<const int> peers = layout_.peers();
    const Collective& c = item.c;
    const auto count = static_cast<std::int64_t>(bytes / size_bytes(c.dtype));
    for (std::size_t k = 0; k < peers.size(); ++k)
      inputs_[k] =
          at + (peers[k] == rank() ? static_cast<const std::byte*>(c.send)
                                   : sends_.send(item.span, static_cast<int>(k), peers[k]));
    const DType wire = wire_dtype(c);
    if (wire == c.dtype)
      return ItemMover(item.exec).reduce(result, inputs_.data(), static_cast<int>(peers.size()),
                                         count, c);
    for (std::size_t k = 0; k < peers.size(); ++k)
      axpy(result, wire, inputs_[k], c.dtype, k == 0 ? 0 : 1, count, item.exec);
  }

  // Each rank's part, combined on this host, goes to that rank, which combines what comes from the
  // hosts, in their order: `result` is this one's.
  void reduce_parts(void* result, const Item& item, const Parts& parts) {
    const Collective& c = item.c;
    const DType wire = wire_dtype(c);
    const auto wire_bytes = [&](int r) {
      return parts.bytes(r) / size_bytes(c.dtype) * size_bytes(wire);
    };
    const int here = layout_.own_host(), hosts = layout_.hosts();
    for (int h = 0; h < hosts; ++h)
      if (h != here) receive(in(rank(), h), wire_bytes(rank()), layout_.partner(h, rank()));
    for (const int r : layout_.served()) {
      std::byte* const part = out(static_cast<std::size_t>(layout_.slot(r)) * block_);
      reduce_here(part, item, parts.at(r), parts.bytes(r));
      send(part, wire_bytes(r), r);
    }
    reduce_here(in(rank(), here), item, parts.at(rank()), parts.bytes(rank()));
    channel_.finish();
    for (int h = 0; h < hosts; ++h) inputs_[static_cast<std::size_t>(h)] = in(rank(), h);
    const auto count = static_cast<std::int64_t>(parts.bytes(rank()) / size_bytes(c.dtype));
    Collective sum = c;
    sum.dtype = wire;
    ItemMover(item.exec).reduce(wire == c.dtype ? result : in(rank(), 0), inputs_.data(), hosts,
                                count, sum);
    if (wire != c.dtype) axpy(result, c.dtype, in(rank(), 0), wire, 0, count, item.exec);
  }

  void reduce_scatter(const Item& item, std::byte* recv) {
    const std::size_t chunk = item_bytes(item.c), block = part_bytes(item.c);
    for (std::size_t at = 0; at < chunk; at += block)
      reduce_parts(recv + at, item, {at, chunk, std::min(block, chunk - at), SIZE_MAX});
  }

  // Each rank reduces its part of a block, then all gather the parts. The last parts are shorter.
  void all_reduce(const Item& item, std::byte* recv) {
    const std::size_t total = item_bytes(item.c), width = size_bytes(item.c.dtype);
    const std::size_t block = part_bytes(item.c) * static_cast<std::size_t>(size());
    for (std::size_t at = 0; at < total; at += block) {
      const std::size_t bytes = std::min(block, total - at);
      const auto elements = static_cast<std::int64_t>(bytes / width);
      const std::size_t part = static_cast<std::size_t>(ceil_div(elements, size())) * width;
      const Parts parts{at, part, part, at + bytes};
      reduce_parts(out(), item, parts);
      gather_parts(recv, out(), parts);
    }
  }

  // A reduce_scatter in which all is the root's part.
  void reduce(const Item& item, std::byte* recv) {
    const std::size_t total = item_bytes(item.c), block = part_bytes(item.c);
    for (std::size_t at = 0; at < total; at += block)
      reduce_parts(rank() == item.c.root ? recv + at : nullptr, item,
                   {at, 0, std::min(block, total - at), SIZE_MAX, item.c.root});
  }

  void all_to_all(const Collective& c, std::byte* recv) {
    const auto* send = static_cast<const std::byte*>(c.send);
    const std::size_t chunk = item_bytes(c), width = size_bytes(c.dtype), n = inputs_.size();
    const std::size_t block = channel_.out_bytes() / n / width * width;
    const auto mine = static_cast<std::size_t>(rank());
    for (std::size_t at = 0; at < chunk; at += block) {
      const std::size_t bytes = std::min(block, chunk - at);
      for (std::size_t r = 0; r < n; ++r)
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

  // Down a tree of hosts, of each the root's partner there: with hosts counted from the root's,
  // each gets it from the one without its lowest bit, and passes it on to those with one lower bit
  // more.
  void broadcast(const Collective& c, std::byte* recv) {
    const std::size_t total = item_bytes(c);
    const auto* from = static_cast<const std::byte*>(c.send);
    const int keeper = layout_.partner(layout_.own_host(), c.root);
    for (std::size_t at = 0; at < total; at += channel_.out_bytes()) {
      const std::size_t bytes = std::min(channel_.out_bytes(), total - at);
      if (rank() == c.root) kernels::copy_bytes(out(), from + at, bytes);
      if (rank() == keeper) pass_on(c.root, bytes);
      meet();
      if (recv != from || rank() != c.root) kernels::copy_bytes(recv + at, exchange(keeper), bytes);
      meet();
    }
  }
  void pass_on(int root, std::size_t bytes) {
    const int hosts = layout_.hosts(), first = layout_.host(root);
    const int me = (layout_.own_host() - first + hosts) % hosts;
    const auto partner = [&](int host) { return layout_.partner((first + host) % hosts, root); };
    int bit = 1;
    while (bit < hosts && (me & bit) == 0) bit *= 2;
    if (me != 0) {
      receive(out(), bytes, partner(me - bit));
      channel_.finish();
    }
    for (bit /= 2; bit > 0; bit /= 2)
      if (me + bit < hosts) send(out(), bytes, partner(me + bit));
    channel_.finish();
  }

  // Of no bytes there is no message.
  void receive(void* data, std::size_t bytes, int from) {
    if (bytes > 0) channel_.receive(data, bytes, from);
  }
  void send(const std::byte* data, std::size_t bytes, int to) {
    if (bytes > 0) channel_.send(data, bytes, to);
  }

  ShmGroup& group_;   // of this host's ranks: who is alive, and whether all is well
  const int number_;  // of the role
  const HostLayout& layout_;
  MpiChannel& channel_;
  const std::vector<std::byte*>
      exchange_;             // of `peers`: what each sends, then what it has received
  const std::size_t block_;  // bytes of a part on its way
  const SharedSends sends_;
  std::uint64_t theirs_[2] = {};
  std::vector<const void*> inputs_;  // of one sum; the stream's
};

}  // namespace

std::unique_ptr<Communicator> make_message_communicator(DeviceContext& context,
                                                        const MessageSetup& setup,
                                                        const GroupSeat& seat,
                                                        std::string_view role, StreamId stream) {
  return std::make_unique<MessageCommunicator>(context, setup, seat, role, stream);
}

}  // namespace tessera::comm
