// The part of a collective that is the same for every transport: checks, counts, the fingerprint,
// costs, and the world of one rank.
#include "tessera/comm/communicator.hpp"

#include <algorithm>
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
struct Sides {
  std::int64_t bytes = 0;  // as comm::item_bytes
  Range send{std::uintptr_t{0}, 0}, recv = send;

  Sides() = default;
  Sides(const Collective& c, int rank, int size) {
    if (c.count == 0 || c.kind == CollectiveKind::barrier) return;
    bytes = checked_mul(c.count, static_cast<std::int64_t>(size_bytes(c.dtype)));
    if (c.kind != CollectiveKind::send_recv || comm::sends(c, rank))
      send = {c.send, checked_mul(bytes, comm::send_chunks(c.kind, size))};
    if (comm::receives(c, rank))
      recv = {c.recv, checked_mul(bytes, comm::recv_chunks(c.kind, size))};
  }
  bool clash(const Sides& o) const {
    return recv.overlaps(o.recv) || recv.overlaps(o.send) || send.overlaps(o.recv);
  }
};

Sides check_item(const Collective& c, std::size_t item, const char* group,
                 comm::StagingPlan& staging, int rank, int size) {
  const bool is_staged = staging.next(c) != comm::StagingPlan::kDirect;
  if (c.kind == CollectiveKind::barrier) return {};
  const auto where = [&] { return concat(name(c.kind), " '", group, "', item ", item, ": "); };
  TESSERA_EXPECT(c.count >= 0, where(), "count is ", c.count, "; give the elements of the item");
  TESSERA_EXPECT(c.root >= 0 && c.root < size, where(), "root is ", c.root, " of ", size, " ranks");
  TESSERA_EXPECT(c.target >= 0 && c.target < size, where(), "target is ", c.target, " of ", size,
                 " ranks");
  TESSERA_EXPECT(c.kind != CollectiveKind::send_recv || is_staged ||
                     staging.address() != comm::StagingPlan::kDirect,
                 where(), "a group has room for ", kMostSendRecvs, " of them, staged items of ",
                 kStagedBytes, " bytes among them; split the group");
  const Sides sides(c, rank, size);
  if (c.count == 0) return sides;
  const auto& [bytes, send, recv] = sides;
  TESSERA_EXPECT((send.begin != 0 || send.end == 0) && (recv.begin != 0 || recv.end == 0), where(),
                 "send is ", c.send, ", recv is ", c.recv,
                 c.kind == CollectiveKind::send_recv ? "; its root gives a send, its target a recv"
                                                     : "; every rank gives both, in place or not");
  const std::size_t width = size_bytes(c.dtype);
  TESSERA_EXPECT(((send.begin | recv.begin) & (width - 1)) == 0, where(), "send ", c.send,
                 " and recv ", c.recv, " must be multiples of the ", width, " bytes of a ",
                 c.dtype);
  if (!send.overlaps(recv)) return sides;
  const auto chunk = static_cast<std::uintptr_t>(bytes * rank);
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
  return sides;
}

// The least that any transport moves: a ring's. Received and sent bytes together.
void add_cost(Cost& cost, const Collective& c, std::int64_t item_bytes, int rank, int size) {
  const auto bytes = static_cast<double>(item_bytes), n = static_cast<double>(size);
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

// No item may write what another reads or writes: they run in any order. Groups are laid out one
// item after another, in one range or in one for sends and one for recvs, which is seen as they are
// added; only others are compared pair by pair.
class ItemsApart {
 public:
  void add(const Sides& s) {
    const bool sends = s.send.begin != 0, receives = s.recv.begin != 0;
    if (sends) in_two_ &= extend(sends_, s.send);
    if (receives) in_two_ &= extend(recvs_, s.recv);
    if (sends || receives)
      in_one_ &= extend(all_, {sends && receives ? std::min(s.send.begin, s.recv.begin)
                                                 : std::max(s.send.begin, s.recv.begin),
                               std::max(s.send.end, s.recv.end)});
  }
  void expect(std::span<const Collective> items, const char* group, int rank, int size) const {
    if (in_one_ || (in_two_ && !sends_.overlaps(recvs_))) return;
    for (std::size_t j = 1; j < items.size(); ++j)
      for (std::size_t i = 0; i < j; ++i)
        TESSERA_EXPECT(!Sides(items[i], rank, size).clash(Sides(items[j], rank, size)),
                       name(items[j].kind), " '", group, "': items ", i, " and ", j,
                       " overlap, and one of them is written; give each item memory of its own");
  }

 private:
  // Whether `by` lies behind what is there.
  static bool extend(Range& range, const Range& by) {
    const bool lies_behind = by.begin >= range.end;
    range = {range.begin == 0 ? by.begin : range.begin, by.end};
    return lies_behind;
  }

  Range sends_{std::uintptr_t{0}, 0}, recvs_ = sends_, all_ = sends_;
  bool in_one_ = true, in_two_ = true;
};

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
  comm::StagingPlan staging(size);
  ItemsApart apart;
  bool moves = false;
  FlightEntry call;
  std::uint64_t content = copy_and_fold(call.name, group, role_hash_);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Sides sides = check_item(items[i], i, group, staging, rank, size);
    apart.add(sides);
    add_cost(op.cost, items[i], sides.bytes, rank, size);
    content = fold(content, items[i]);
    call.bytes += sides.bytes;
    moves |= sides.bytes > 0 && items[i].send != items[i].recv;
  }
  apart.expect(items, group, rank, size);
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
