// The part of a collective that is the same for every transport: checks, counts, the fingerprint,
// costs, and the world of one rank.
#include "tessera/comm/communicator.hpp"

#include <cstring>
#include <functional>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/pull.hpp"
#include "tessera/base/checked.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"

namespace tessera {
namespace {

struct Range {
  std::uintptr_t begin, end;

  Range(const void* data, std::int64_t bytes)
      : begin(reinterpret_cast<std::uintptr_t>(data)),
        end(begin + static_cast<std::uintptr_t>(bytes)) {}
  bool overlaps(const Range& o) const { return begin < o.end && o.begin < end; }
};

// The elements of the send and of the recv side.
std::int64_t send_count(const Collective& c, int size) {
  return c.kind == CollectiveKind::reduce_scatter ? checked_mul(c.count, size) : c.count;
}
std::int64_t recv_count(const Collective& c, int size) {
  return c.kind == CollectiveKind::all_gather ? checked_mul(c.count, size) : c.count;
}

void check_item(const Collective& c, std::size_t item, const char* group, std::int64_t staged,
                int rank, int size) {
  if (c.kind == CollectiveKind::barrier) return;
  const auto where = [&] { return concat(name(c.kind), " '", group, "', item ", item, ": "); };
  TESSERA_EXPECT(c.count >= 0, where(), "count is ", c.count, "; give the elements of the item");
  TESSERA_EXPECT(c.root >= 0 && c.root < size, where(), "root is ", c.root, " of ", size, " ranks");
  if (c.count == 0) return;
  TESSERA_EXPECT(c.send != nullptr && c.recv != nullptr, where(), "send is ", c.send, ", recv is ",
                 c.recv, "; every rank gives both, in place or not");
  const auto width = static_cast<std::int64_t>(size_bytes(c.dtype));
  const Range send(c.send, checked_mul(send_count(c, size), width));
  const Range recv(c.recv, checked_mul(recv_count(c, size), width));
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
  TESSERA_EXPECT(c.kind != CollectiveKind::all_reduce || staged >= 0 || size == 1, where(), c.count,
                 " x ", c.dtype, " in place do not fit the ", kStagedBytes,
                 " bytes that a group stages; use a recv of its own or split the group");
}

// The least that any transport moves: a ring's. Received and sent bytes together.
void add_cost(Cost& cost, const Collective& c, int size) {
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
    case CollectiveKind::barrier:
      break;
  }
}

std::uint64_t fold(std::uint64_t hash, const Collective& c) {
  hash = fnv1a((static_cast<std::uint64_t>(c.kind) << 40) |
                   (static_cast<std::uint64_t>(c.dtype) << 32) | static_cast<std::uint32_t>(c.root),
               hash);
  return fnv1a(static_cast<std::uint64_t>(c.count), hash);
}

// One rank alone: what it sends is what it receives.
struct CopyAlone {
  comm::GroupCall call;
  void operator()(Exec&) const {
    for (const Collective& c : call.items())
      if (c.count > 0 && c.send != c.recv) kernels::copy_bytes(c.recv, c.send, comm::item_bytes(c));
  }
};

}  // namespace

const char* name(CollectiveKind kind) {
  constexpr const char* kNames[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast",
                                    "barrier"};
  return kNames[static_cast<int>(kind)];
}

void Communicator::submit(const CollectiveGroup& group, std::span<const Access> accesses) {
  check_and_launch(group.items, group.name, accesses, true);
}

void Communicator::submit(const Collective& collective, const char* op,
                          std::span<const Access> accesses) {
  check_and_launch({&collective, 1}, op, accesses, false);
}

void Communicator::check_and_launch(std::span<const Collective> items, const char* group,
                                    std::span<const Access> accesses, bool prepared) {
  TESSERA_EXPECT(group != nullptr && !items.empty(), "Communicator::submit: the group '",
                 group ? group : "", "' has no name or no item");
  Op op{.name = group, .cost = {}, .accesses = accesses};
  comm::StagingPlan staging;
  bool moves = false;
  std::uint64_t hash = fnv1a(std::string_view(group), fingerprint_);
  for (std::size_t i = 0; i < items.size(); ++i) {
    check_item(items[i], i, group, staging.next(items[i]), rank_, size_);
    add_cost(op.cost, items[i], size_);
    hash = fold(hash, items[i]);
    moves |= items[i].count > 0 && items[i].kind != CollectiveKind::barrier &&
             items[i].send != items[i].recv;
  }
  if (size_ == 1) {
    const CopyAlone copy{comm::GroupCall(*this, group, items, prepared)};
    if (moves) Stream(context_, stream_).launch(op, copy);
    return;
  }
  const std::uint64_t before = std::exchange(fingerprint_, hash);
  ++submitted_;
  try {
    launch(op, items, prepared);
  } catch (...) {  // refused: as if never submitted
    fingerprint_ = before;
    --submitted_;
    throw;
  }
}

}  // namespace tessera
