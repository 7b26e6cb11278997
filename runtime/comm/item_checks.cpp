#include "runtime/comm/item_checks.hpp"

#include "tessera/base/error.hpp"
#include "tessera/comm/flight_recorder.hpp"
#include "tessera/detail/base/checked.hpp"

namespace tessera::comm {
namespace {

AddressRange range_of(const void* data, std::int64_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  return {begin, begin + static_cast<std::uintptr_t>(bytes)};
}

// Whether `by` lies behind what is there, which it joins.
bool extend(AddressRange& range, const AddressRange& by) {
  const bool lies_behind = by.begin >= range.end;
  range = {range.begin == 0 ? by.begin : range.begin, by.end};
  return lies_behind;
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
    case CollectiveKind::reduce:  // as a reduce_scatter, of which it is one rank's part
      cost.wire_bytes += 2 * (n - 1) / n * bytes;
      if (c.root == rank) cost.bytes += (n + 1) * bytes;
      break;
    case CollectiveKind::broadcast:  // as an all_gather
      cost.wire_bytes += 2 * (n - 1) / n * bytes;
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

}  // namespace

CheckedItems check_items(const char* group, std::span<const Collective> items, int rank, int size) {
  TESSERA_EXPECT(group != nullptr && !items.empty(), "Communicator::submit: the group '",
                 group ? group : "", "' has no name or no item");
  CheckedItems found{.rank = rank, .size = size};
  ItemChecks checks(group, rank, size);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::int64_t bytes = checks.add(items[i], i);
    add_cost(found.cost, items[i], bytes, rank, size);
    found.content = fold(found.content, items[i]);
    found.bytes += bytes;
    found.moves |= bytes > 0 && items[i].send != items[i].recv;
  }
  checks.expect_apart(items);
  return found;
}

void check_order(const char* group, const Clock& known, StreamId stream,
                 std::span<const Access> accesses) {
  for (const Access& access : accesses) {
    if (access.mode != AccessMode::write || known.covers(access.use->touched)) continue;
    for (const StreamId other : kStreams) {
      const Tick touched = access.use->touched[other];
      TESSERA_EXPECT(touched <= known[other], "Communicator::submit '", group, "': stream ",
                     name(stream), " writes memory that operation ", touched, " of stream ",
                     name(other), " touches, but waits only for operation ", known[other],
                     "; make it wait: stream.wait(other.record())");
    }
  }
}

ItemSides::ItemSides(const Collective& c, int rank, int size) {
  if (c.count == 0 || c.kind == CollectiveKind::barrier) return;
  bytes = checked_mul(c.count, static_cast<std::int64_t>(size_bytes(c.dtype)));
  if (c.kind != CollectiveKind::send_recv || sends(c, rank))
    send = range_of(c.send, checked_mul(bytes, send_chunks(c.kind, size)));
  if (receives(c, rank)) recv = range_of(c.recv, checked_mul(bytes, recv_chunks(c.kind, size)));
}

std::int64_t ItemChecks::add(const Collective& c, std::size_t item) {
  const bool is_staged = staging_.next(c) != StagingPlan::kDirect;
  if (c.kind == CollectiveKind::barrier) return 0;
  const auto where = [&] { return concat(name(c.kind), " '", group_, "', item ", item, ": "); };
  TESSERA_EXPECT(c.count >= 0, where(), "count is ", c.count, "; give the elements of the item");
  TESSERA_EXPECT(!is_storage_only(c.dtype) ||
                     (c.kind != CollectiveKind::all_reduce &&
                      c.kind != CollectiveKind::reduce_scatter && c.kind != CollectiveKind::reduce),
                 where(), "nothing is computed in ", c.dtype, "; cast to f32 or bf16 first");
  TESSERA_EXPECT(c.root >= 0 && c.root < size_, where(), "root is ", c.root, ", expected 0 to ",
                 size_ - 1);
  TESSERA_EXPECT(c.target >= 0 && c.target < size_, where(), "target is ", c.target,
                 ", expected 0 to ", size_ - 1);
  TESSERA_EXPECT(c.kind != CollectiveKind::send_recv || is_staged ||
                     staging_.address() != StagingPlan::kDirect,
                 where(), "a group has room for ", kMostSendRecvs,
                 " send_recvs, of which it stages ", kStagedBytes, " bytes; split the group");
  const ItemSides sides(c, rank_, size_);
  if (c.count == 0) return 0;
  const auto& [bytes, send, recv] = sides;
  TESSERA_EXPECT((send.begin != 0 || send.end == 0) && (recv.begin != 0 || recv.end == 0), where(),
                 "send is ", c.send, ", recv is ", c.recv,
                 c.kind == CollectiveKind::send_recv ? "; its root gives a send, its target a recv"
                 : c.kind == CollectiveKind::reduce  ? "; every rank gives a send, its root a recv"
                                                     : "; every rank gives both, in place or not");
  const std::size_t width = size_bytes(c.dtype);
  TESSERA_EXPECT(((send.begin | recv.begin) & (width - 1)) == 0, where(), "send ", c.send,
                 " and recv ", c.recv, " must be multiples of the ", width, " bytes of a ",
                 c.dtype);
  const bool sends = send.begin != 0, receives = recv.begin != 0;
  if (sends) in_two_ &= extend(sends_, send);
  if (receives) in_two_ &= extend(recvs_, recv);
  if (sends || receives)
    in_one_ &= extend(all_, {sends && receives ? std::min(send.begin, recv.begin)
                                               : std::max(send.begin, recv.begin),
                             std::max(send.end, recv.end)});
  if (!send.overlaps(recv)) return bytes;
  const auto chunk = static_cast<std::uintptr_t>(bytes * rank_);
  const bool in_place = c.kind == CollectiveKind::all_gather ? send.begin == recv.begin + chunk
                        : c.kind == CollectiveKind::reduce_scatter
                            ? recv.begin == send.begin + chunk
                            : recv.begin == send.begin;
  TESSERA_EXPECT(in_place, where(), "send ", c.send, " and recv ", c.recv,
                 " overlap, but not as in place (see Collective)");
  const bool reads_while_writing =
      c.kind == CollectiveKind::all_reduce || c.kind == CollectiveKind::all_to_all;
  TESSERA_EXPECT(!reads_while_writing || is_staged || size_ == 1, where(), c.count, " x ", c.dtype,
                 " in place do not fit the ", kStagedBytes,
                 " bytes that a group stages; use a recv of its own or split the group");
  return bytes;
}

void ItemChecks::expect_apart(std::span<const Collective> items) const {
  if (in_one_ || (in_two_ && !sends_.overlaps(recvs_))) return;
  for (std::size_t j = 1; j < items.size(); ++j)
    for (std::size_t i = 0; i < j; ++i)
      TESSERA_EXPECT(!ItemSides(items[i], rank_, size_).clash(ItemSides(items[j], rank_, size_)),
                     name(items[j].kind), " '", group_, "': items ", i, " and ", j,
                     " overlap, and one of them is written; give each item memory of its own");
}

}  // namespace tessera::comm
