// The part of a collective that is the same for every transport: checks, counts, the fingerprint,
// costs, and the world of one rank.
#include "tessera/comm/communicator.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/pull.hpp"
#include "tessera/base/checked.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/flight_recorder.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace {

struct Range {
  std::uintptr_t begin, end;

  Range(const void* data, std::int64_t bytes)
      : begin(reinterpret_cast<std::uintptr_t>(data)),
        end(begin + static_cast<std::uintptr_t>(bytes)) {}
  Range(std::uintptr_t b, std::uintptr_t e) : begin(b), end(e) {}
  bool overlaps(const Range& o) const { return begin < o.end && o.begin < end; }
};

// The bytes of the send and of the recv side; one that this rank does not give has none.
Range send_side(const Collective& c, int rank, int size) {
  if (c.kind == CollectiveKind::send_recv && !comm::sends(c, rank)) return {nullptr, 0};
  const auto width = static_cast<std::int64_t>(size_bytes(c.dtype));
  return {c.send, checked_mul(checked_mul(c.count, comm::send_chunks(c.kind, size)), width)};
}
Range recv_side(const Collective& c, int rank, int size) {
  if (!comm::receives(c, rank)) return {nullptr, 0};
  const auto width = static_cast<std::int64_t>(size_bytes(c.dtype));
  return {c.recv, checked_mul(checked_mul(c.count, comm::recv_chunks(c.kind, size)), width)};
}

void check_item(const Collective& c, std::size_t item, const char* group,
                comm::StagingPlan& staging, int rank, int size) {
  const bool is_staged = staging.next(c) != comm::StagingPlan::kDirect;
  if (c.kind == CollectiveKind::barrier) return;
  const auto where = [&] { return concat(name(c.kind), " '", group, "', item ", item, ": "); };
  TESSERA_EXPECT(c.count >= 0, where(), "count is ", c.count, "; give the elements of the item");
  TESSERA_EXPECT(c.root >= 0 && c.root < size, where(), "root is ", c.root, " of ", size, " ranks");
  TESSERA_EXPECT(c.target >= 0 && c.target < size, where(), "target is ", c.target, " of ", size,
                 " ranks");
  TESSERA_EXPECT(c.kind != CollectiveKind::send_recv || is_staged ||
                     staging.address() != comm::StagingPlan::kDirect,
                 where(), "a group has room for ", kMostSendRecvs, " of them, staged items of ",
                 kStagedBytes, " bytes among them; split the group");
  if (c.count == 0) return;
  const Range send = send_side(c, rank, size), recv = recv_side(c, rank, size);
  TESSERA_EXPECT((send.begin != 0 || send.end == 0) && (recv.begin != 0 || recv.end == 0), where(),
                 "send is ", c.send, ", recv is ", c.recv,
                 c.kind == CollectiveKind::send_recv ? "; its root gives a send, its target a recv"
                                                     : "; every rank gives both, in place or not");
  const auto width = static_cast<std::int64_t>(size_bytes(c.dtype));
  TESSERA_EXPECT(send.begin % size_bytes(c.dtype) == 0 && recv.begin % size_bytes(c.dtype) == 0,
                 where(), "send ", c.send, " and recv ", c.recv, " must be multiples of the ",
                 width, " bytes of a ", c.dtype);
  if (!send.overlaps(recv)) return;
  const auto chunk = static_cast<std::uintptr_t>(c.count * width * rank);
  const bool in_place = c.kind == CollectiveKind::all_gather ? send.begin == recv.begin + chunk
                        : c.kind == CollectiveKind::reduce_scatter
                            ? recv.begin == send.begin + chunk
                            : recv.begin == send.begin;
  TESSERA_EXPECT(in_place, where(), "send ", c.send, " and recv ", c.recv,
                 " overlap, but not as in place (see Collective)");
  const bool reads_while_writing =
      c.kind == CollectiveKind::all_reduce || c.kind == CollectiveKind::all_to_all;
  TESSERA_EXPECT(!reads_while_writing || is_staged || size == 1, where(), c.count, " x ", c.dtype,
                 " in place do not fit the ", kStagedBytes,
                 " bytes that a group stages; use a recv of its own or split the group");
}

// The least that any transport moves: a ring's. Received and sent bytes together.
void add_cost(Cost& cost, const Collective& c, int rank, int size) {
  const double bytes = static_cast<double>(c.count) * static_cast<double>(size_bytes(c.dtype));
  const double n = size;
  switch (c.kind) {
    case CollectiveKind::all_gather:
      cost.wire_bytes += 2 * (n - 1) * bytes;
      cost.bytes += 2 * n * bytes;
      break;
    case CollectiveKind::reduce_scatter:
      cost.wire_bytes += 2 * (n - 1) * bytes;
      cost.bytes += (n + 1) * bytes;
      break;
    case CollectiveKind::all_reduce:
      cost.wire_bytes += 4 * (n - 1) / n * bytes;
      cost.bytes += (n + 1) * bytes;
      break;
    case CollectiveKind::broadcast:
      cost.wire_bytes += bytes;
      cost.bytes += 2 * bytes;
      break;
    case CollectiveKind::all_to_all:
      cost.wire_bytes += 2 * (n - 1) * bytes;
      cost.bytes += 2 * n * bytes;
      break;
    case CollectiveKind::send_recv:
      if (c.root != c.target && (c.root == rank || c.target == rank)) cost.wire_bytes += bytes;
      if (c.target == rank) cost.bytes += 2 * bytes;
      break;
    case CollectiveKind::barrier:
      break;
  }
}

std::uint64_t fold(std::uint64_t hash, const Collective& c) {
  hash = mix(hash, (static_cast<std::uint64_t>(c.kind) << 48) |
                       (static_cast<std::uint64_t>(c.dtype) << 40) |
                       (static_cast<std::uint64_t>(c.reduce) << 32) |
                       static_cast<std::uint32_t>(c.root));
  if (c.kind == CollectiveKind::send_recv) hash = mix(hash, static_cast<std::uint64_t>(c.target));
  return mix(hash, static_cast<std::uint64_t>(c.count));
}

// Copies `text`, cut where it is longer, and folds all of it into the hash, a word at a time.
template <std::size_t N>
std::uint64_t copy_and_fold(char (&out)[N], const char* text, std::uint64_t hash) {
  const std::size_t length = std::strlen(text);
  std::memcpy(out, text, std::min(length, N - 1));
  std::size_t i = 0;
  for (std::uint64_t word = 0; i + sizeof word <= length; i += sizeof word) {
    std::memcpy(&word, text + i, sizeof word);
    hash = mix(hash, word);
  }
  std::uint64_t rest = length << 56;
  std::memcpy(&rest, text + i, length - i);
  return mix(hash, rest);
}

// What one item reads and what it writes; in place the chunk that it both reads and writes.
struct Sides {
  Range read, write;
  bool empty;

  Sides(const Collective& c, int rank, int size)
      : read(send_side(c, rank, size)),
        write(recv_side(c, rank, size)),
        empty(c.count == 0 || c.kind == CollectiveKind::barrier ||
              (read.begin == 0 && write.begin == 0)) {
    if (read.begin == 0) read = {write.begin, write.begin};  // of a send_recv
    if (write.begin == 0) write = {read.begin, read.begin};
  }
  bool clashes(const Sides& o) const {
    return write.overlaps(o.write) || write.overlaps(o.read) || read.overlaps(o.write);
  }
  Range hull() const { return {std::min(read.begin, write.begin), std::max(read.end, write.end)}; }
};

// No item may write what another reads or writes: they run in any order. Groups are laid out one
// item after another, in one range or in one for sends and one for recvs, which is seen in one
// pass; only others are compared pair by pair.
void check_items_apart(std::span<const Collective> items, const char* group, int rank, int size) {
  if (items.size() < 2) return;
  Range reads{std::uintptr_t{0}, 0}, writes = reads, both = reads;
  bool in_one = true, in_two = true;
  for (const Collective& c : items) {
    const Sides s(c, rank, size);
    if (s.empty) continue;
    in_one &= s.hull().begin >= both.end;
    in_two &= s.read.begin >= reads.end && s.write.begin >= writes.end;
    both = {both.begin == 0 ? s.hull().begin : both.begin, s.hull().end};
    reads = {reads.begin == 0 ? s.read.begin : reads.begin, s.read.end};
    writes = {writes.begin == 0 ? s.write.begin : writes.begin, s.write.end};
  }
  if (in_one || (in_two && !reads.overlaps(writes))) return;
  for (std::size_t j = 1; j < items.size(); ++j)
    for (std::size_t i = 0; i < j; ++i) {
      const Sides a(items[i], rank, size), b(items[j], rank, size);
      TESSERA_EXPECT(a.empty || b.empty || !a.clashes(b), name(items[j].kind), " '", group,
                     "': items ", i, " and ", j,
                     " overlap, and one of them is written; give each item memory of its own");
    }
}

// One rank alone: what it sends is what it receives.
struct CopyAlone {
  comm::GroupCall call;
  void operator()(Exec& exec) const {
    const comm::Mover mover(exec);
    for (const Collective& c : call.items())
      if (c.count > 0) mover.copy(c.recv, c.send, comm::item_bytes(c));
  }
};

}  // namespace

const char* name(CollectiveKind kind) {
  constexpr const char* kNames[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast",
                                    "all_to_all", "send_recv",      "barrier"};
  return kNames[static_cast<int>(kind)];
}

const char* name(ReduceOp reduce) { return reduce == ReduceOp::sum ? "sum" : "max"; }

Communicator::Communicator(DeviceContext& context, FlightRecorder& recorder, const GroupSeat& seat,
                           std::string_view role, StreamId stream)
    : context_(context),
      recorder_(recorder),
      seat_(seat),
      role_(comm::role_name(seat, role)),
      stream_(stream) {
  FlightEntry probe;
  role_hash_ = copy_and_fold(probe.role, role_.c_str(), index(stream));
}

void Communicator::submit(const CollectiveGroup& group, std::span<const Access> accesses) {
  check_and_launch(group.items, group.name, accesses, true, group.backward_of);
}

void Communicator::submit(const Collective& collective, const char* op,
                          std::span<const Access> accesses) {
  check_and_launch({&collective, 1}, op, accesses, false, 0);
}

void Communicator::check_and_launch(std::span<const Collective> items, const char* group,
                                    std::span<const Access> accesses, bool prepared,
                                    std::uint64_t backward_of) {
  TESSERA_EXPECT(group != nullptr && !items.empty(), "Communicator::submit: the group '",
                 group ? group : "", "' has no name or no item");
  TESSERA_EXPECT(!has_ended_, "Communicator::submit '", group, "': ", comm::kWorldHasEnded);
  Op op{.name = group, .cost = {}, .accesses = accesses};
  const int rank = seat_.rank, size = seat_.size();
  op.cost.ranks = size;
  op.cost.rank_step = size > 1 ? std::abs(seat_.ranks[1] - seat_.ranks[0]) : 1;
  comm::StagingPlan staging(size);
  bool moves = false;
  FlightEntry call;
  std::uint64_t content = copy_and_fold(call.name, group, role_hash_);
  for (std::size_t i = 0; i < items.size(); ++i) {
    check_item(items[i], i, group, staging, rank, size);
    add_cost(op.cost, items[i], rank, size);
    content = fold(content, items[i]);
    call.bytes += static_cast<std::int64_t>(comm::item_bytes(items[i]));
    moves |= items[i].count > 0 && items[i].kind != CollectiveKind::barrier &&
             items[i].send != items[i].recv;
  }
  check_items_apart(items, group, rank, size);
  check_order(group, accesses);
  if (size == 1) {
    const CopyAlone copy{comm::GroupCall(call, 0, group, items, prepared)};
    if (moves) Stream(context_, stream_).launch(op, copy);
    return;
  }
  check_transport(group, items);
  const Collective& first = items.front();
  for (const FlightRecorder* outer : seat_.around) {
    content = mix(content, outer->fingerprint());
    call.around += outer->last_submitted();
  }
  call.backward_of = backward_of;
  call.count = first.count;
  call.n_items = static_cast<std::int32_t>(items.size());
  call.root = first.root;
  call.target = first.target;
  call.kind = first.kind;
  call.dtype = first.dtype;
  call.reduce = first.reduce;
  call.stream = stream_;
  std::memcpy(call.role, role_.c_str(), std::min(role_.size(), sizeof call.role - 1));
  const std::uint64_t previous = recorder_.fingerprint();
  recorder_.submit(call, content);
  ++submitted_;
  launch(op, comm::GroupCall(call, previous, group, items, prepared));
}

// The collective writes these bytes on its own stream: whatever touched their allocation before, on
// any stream, must be ordered before it.
void Communicator::check_order(const char* group, std::span<const Access> accesses) const {
  const Clock& known = context_.clock(stream_);
  for (const Access& access : accesses) {
    if (access.mode != AccessMode::write || known.covers(access.use->touched)) continue;
    for (int s = 0; s < kMaxStreams; ++s) {
      const auto other = static_cast<StreamId>(s);
      const Tick touched = access.use->touched[other];
      TESSERA_EXPECT(touched <= known[other], "Communicator::submit '", group, "': stream ",
                     name(stream_), " writes memory that operation ", touched, " of stream ",
                     name(other), " touches, and is ordered after ", known[other],
                     " only; make it wait: stream.wait(other.record())");
    }
  }
}

}  // namespace tessera
