#include "tests/emulator/nccl/kernel.hpp"

#include <algorithm>
#include <cstring>

#include "tests/emulator/nccl/reduce.hpp"

namespace tessera::nccl_double {
namespace {

struct Record {
  Call call;             // its pointers mean nothing to a peer
  std::uint64_t at = 0;  // where its data lies on the wire
};
struct Message {
  std::uint64_t records, launches, launches_at;
};

// Blocks of `count` that a rank sends.
std::size_t blocks_of(const Call& call, int rank, int ranks) {
  switch (call.kind) {
    case Kind::reduce_scatter:
    case Kind::all_to_all:
      return static_cast<std::size_t>(ranks);
    case Kind::broadcast:
      return call.peer == rank ? 1 : 0;
    case Kind::receive:
      return 0;
    default:
      return 1;
  }
}
std::size_t bytes_of(const Call& call) { return call.count * size_of(call.dtype); }
// What a rank receives from its peers, where reductions go around in rings.
std::size_t moved_by(const Call& call, int rank, int ranks) {
  const std::size_t bytes = bytes_of(call), peers = static_cast<std::size_t>(ranks - 1);
  switch (call.kind) {
    case Kind::send:
      return 0;
    case Kind::broadcast:
    case Kind::receive:
      return call.peer == rank ? 0 : bytes;
    case Kind::all_reduce:
      return 2 * peers * bytes / static_cast<std::size_t>(ranks);
    default:
      return peers * bytes;
  }
}

std::string text_of(const Call& call) {
  std::string text = name_of(call.kind);
  text += " of " + std::to_string(call.count) + " " + name_of(call.dtype);
  if (call.kind == Kind::all_reduce || call.kind == Kind::reduce_scatter)
    text += std::string(", ") + name_of(call.op);
  if (call.kind == Kind::broadcast) text += " from root " + std::to_string(call.peer);
  return text;
}

class Kernel {
 public:
  Kernel(std::shared_ptr<Comm> comm, std::vector<Call> calls, std::vector<Launches> launches,
         bool is_captured)
      : comm_(std::move(comm)),
        calls_(std::move(calls)),
        launches_(std::move(launches)),
        is_captured_(is_captured) {
    for (const Call& call : calls_) is_joint_ |= is_collective(call.kind);
    if (is_captured_) {
      ++comm_->graphs;
      ++totals().graphs;
    } else {
      ticket_ = comm_->launched++;
      begin();
    }
  }
  ~Kernel() {
    if (!is_captured_) return;
    --comm_->graphs;
    --totals().graphs;
  }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  void run() {
    if (is_captured_) begin();
    take_turn();
    ++comm_->slot().running;
    exchange();
    --comm_->slot().running;
    comm_->board->ring();
    end_turn();
    --comm_->queued;
    --totals().queued[comm_->device];
  }

 private:
  void begin() {
    ++comm_->queued;
    ++totals().queued[comm_->device];
  }
  // Kernels of one communicator run in the order of their launches, whatever their streams.
  void take_turn() {
    std::unique_lock lock(comm_->turns);
    comm_->turned.wait(lock, [this] {
      return comm_->is_aborted || (!comm_->is_busy && (is_captured_ || comm_->turn == ticket_));
    });
    comm_->is_busy = true;
  }
  void end_turn() {
    {
      const std::lock_guard lock(comm_->turns);
      comm_->is_busy = false;
      if (!is_captured_) comm_->turn = std::max(comm_->turn, ticket_ + 1);
    }
    comm_->turned.notify_all();
  }
  void stall() {
    comm_->board->wait([this] { return comm_->is_aborted.load(); });
  }
  bool concerns(int peer, Kind kind) const {
    if (is_joint_) return true;
    return std::any_of(calls_.begin(), calls_.end(),
                       [&](const Call& call) { return call.kind == kind && call.peer == peer; });
  }
  std::atomic<std::uint64_t>& sent(int from, int to) { return comm_->board->slot(from).sent[to]; }
  std::atomic<std::uint64_t>& taken(int by, int from) { return comm_->board->slot(by).taken[from]; }

  void exchange() {
    if (comm_->is_aborted) return;
    const Fault fault = next_fault(comm_->lineage->rank);
    if (fault.result != ncclSuccess && fault.stalls)
      comm_->break_by(fault.result, "an asynchronous error that a test asked for");
    if (fault.stalls || comm_->result != ncclSuccess) return stall();
    if (!write()) return stall();
    for (int peer = 0; peer < comm_->ranks; ++peer)
      if (concerns(peer, Kind::send)) ++sent(comm_->rank, peer);
    comm_->board->ring();
    for (int peer = 0; peer < comm_->ranks; ++peer)
      if (concerns(peer, Kind::receive)) {
        comm_->board->wait([&] {
          return comm_->is_aborted || sent(peer, comm_->rank) > taken(comm_->rank, peer);
        });
        if (comm_->is_aborted) return;
        compare(peer);
      }
    if (comm_->result == ncclSuccess) move();
    for (int peer = 0; peer < comm_->ranks; ++peer)
      if (concerns(peer, Kind::receive)) ++taken(comm_->rank, peer);
    comm_->board->ring();
    if (comm_->result != ncclSuccess) return stall();
    for (int peer = 0; peer < comm_->ranks; ++peer)
      comm_->board->wait(
          [&] { return comm_->is_aborted || sent(comm_->rank, peer) == taken(peer, comm_->rank); });
  }

  bool write() {
    Message message{calls_.size(), launches_.size(), 0};
    message.launches_at = sizeof message + calls_.size() * sizeof(Record);
    std::size_t end = message.launches_at + launches_.size() * sizeof(Launches);
    std::vector<Record> records;
    for (const Call& call : calls_) {
      end = (end + 63) / 64 * 64;
      records.push_back({call, end});
      end += bytes_of(call) * blocks_of(call, comm_->rank, comm_->ranks);
    }
    if (!comm_->board->reserve(comm_->rank, end)) {
      comm_->break_by(ncclSystemError, "the double has no shared memory for " +
                                           std::to_string(end) + " bytes of one group");
      return false;
    }
    std::byte* const wire = comm_->board->wire(comm_->rank);
    const auto put = [&](std::size_t at, const void* data, std::size_t bytes) {
      if (bytes > 0) std::memcpy(wire + at, data, bytes);
    };
    put(0, &message, sizeof message);
    put(sizeof message, static_cast<const void*>(records.data()), records.size() * sizeof(Record));
    put(message.launches_at, launches_.data(), launches_.size() * sizeof(Launches));
    for (const Record& r : records)
      put(r.at, r.call.send, bytes_of(r.call) * blocks_of(r.call, comm_->rank, comm_->ranks));
    return true;
  }

  const Message& message_of(int peer) const {
    return *reinterpret_cast<const Message*>(comm_->board->wire(peer));
  }
  // What `peer` asks for, where it concerns this rank: its collectives, and its sends to this rank.
  std::vector<Record> records_of(int peer) const {
    const Message& message = message_of(peer);
    const auto* const all = reinterpret_cast<const Record*>(&message + 1);
    std::vector<Record> records;
    std::copy_if(all, all + message.records, std::back_inserter(records), [&](const Record& r) {
      return is_collective(r.call.kind) ||
             (r.call.kind == Kind::send && r.call.peer == comm_->rank);
    });
    return records;
  }
  std::vector<Call> expected_of(int peer) const {
    std::vector<Call> calls;
    std::copy_if(calls_.begin(), calls_.end(), std::back_inserter(calls), [&](const Call& call) {
      return is_collective(call.kind) || (call.kind == Kind::receive && call.peer == peer);
    });
    return calls;
  }

  void compare(int peer) {
    const std::vector<Record> theirs = records_of(peer);
    const std::vector<Call> mine = expected_of(peer);
    const std::string us = comm_->name(), them = "rank " + std::to_string(peer);
    for (std::size_t i = 0; i < std::max(mine.size(), theirs.size()); ++i) {
      const Call* const a = i < mine.size() ? &mine[i] : nullptr;
      const Call* const b = i < theirs.size() ? &theirs[i].call : nullptr;
      const bool is_pair = a && b && a->kind == Kind::receive && b->kind == Kind::send;
      if (a && b && a->place != b->place)
        return comm_->break_by(ncclInvalidUsage,
                               text_of(*a) + " lies elsewhere in windows on " + us + " than on " +
                                   them + ", or in none; NCCL takes one way on all ranks");
      if (a && b && a->count == b->count && a->dtype == b->dtype &&
          (is_pair || (a->kind == b->kind && a->op == b->op && a->peer == b->peer)))
        continue;
      comm_->break_by(
          ncclInvalidUsage,
          "call " + std::to_string(i) + " of a group is " +
              (a ? text_of(*a) : std::string("none")) + " on " + us + ", and " +
              (b ? text_of(*b) : std::string("none")) + " on " + them +
              "; the calls on one communicator are the same on all ranks, in one order");
      return;
    }
    const Message& message = message_of(peer);
    const auto* const counts =
        reinterpret_cast<const Launches*>(comm_->board->wire(peer) + message.launches_at);
    if (settings().any_order) return;
    for (const Launches& here : launches_)
      for (const Launches* there = counts; there != counts + message.launches; ++there)
        if (here.hash == there->hash && here.count != there->count)
          return comm_->break_by(ncclInvalidUsage,
                                 us + " and " + them +
                                     " launch on their communicators in different "
                                     "orders: before the same kernel, " +
                                     std::to_string(here.count) + " and " +
                                     std::to_string(there->count) +
                                     " kernels on another communicator");
  }

  // The data of the call that is the i-th of those that concern this rank and `peer`.
  const std::byte* data_of(int peer, std::size_t i) const {
    return comm_->board->wire(peer) + records_of(peer)[i].at;
  }

  void move() {
    std::size_t joint = 0;
    std::vector<std::size_t> received(static_cast<std::size_t>(comm_->ranks));
    for (const Call& call : calls_) {
      totals().moved += static_cast<long long>(moved_by(call, comm_->rank, comm_->ranks));
      if (call.kind == Kind::send) continue;
      if (call.kind == Kind::receive) {
        // Among the records of that peer, the collectives before this one stand between.
        std::size_t at = received[static_cast<std::size_t>(call.peer)]++;
        const std::vector<Record> theirs = records_of(call.peer);
        for (std::size_t i = 0; i < theirs.size(); ++i)
          if (theirs[i].call.kind == Kind::send && at-- == 0)
            copy(call.recv, comm_->board->wire(call.peer) + theirs[i].at, bytes_of(call));
        spoil(call);
        continue;
      }
      std::vector<const std::byte*> from;
      for (int peer = 0; peer < comm_->ranks; ++peer) {
        const std::vector<Record> theirs = records_of(peer);
        std::size_t at = joint;
        for (const Record& r : theirs)
          if (is_collective(r.call.kind) && at-- == 0)
            from.push_back(comm_->board->wire(peer) + r.at);
      }
      ++joint;
      deliver(call, from);
      spoil(call);
    }
  }

  void spoil(const Call& call) const {
    const bool fans_out = call.kind == Kind::all_gather || call.kind == Kind::all_to_all;
    const std::size_t bytes = bytes_of(call) * (fans_out ? std::size_t(comm_->ranks) : 1);
    const auto least = static_cast<std::size_t>(settings().spoil);
    if (least > 0 && bytes >= least)
      static_cast<std::byte*>(call.recv)[bytes - 1] ^= std::byte{0x40};
  }

  static void copy(void* to, const std::byte* from, std::size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }

  // `from`: of each rank, in their order.
  void deliver(const Call& call, const std::vector<const std::byte*>& from) const {
    const std::size_t bytes = bytes_of(call), ranks = from.size(),
                      rank = static_cast<std::size_t>(comm_->rank);
    auto* const to = static_cast<std::byte*>(call.recv);
    switch (call.kind) {
      case Kind::all_gather:
        for (std::size_t r = 0; r < ranks; ++r) copy(to + r * bytes, from[r], bytes);
        return;
      case Kind::all_to_all:
        for (std::size_t r = 0; r < ranks; ++r) copy(to + r * bytes, from[r] + rank * bytes, bytes);
        return;
      case Kind::broadcast:
        return copy(to, from[static_cast<std::size_t>(call.peer)], bytes);
      case Kind::reduce_scatter:
        return ring(to, from, rank * call.count, call.count, rank, call);
      case Kind::all_reduce: {
        const std::size_t unit = 16 / size_of(call.dtype);
        const std::size_t chunk = ((call.count + ranks - 1) / ranks + unit - 1) / unit * unit;
        for (std::size_t r = 0, at = 0; at < call.count; ++r, at += chunk)
          ring(to + at * size_of(call.dtype), from, at, std::min(chunk, call.count - at), r, call);
        return;
      }
      default:
        return;
    }
  }
  // A chunk goes around once: it begins at the rank after `last`, and each adds its own.
  static void ring(std::byte* to, const std::vector<const std::byte*>& from, std::size_t first,
                   std::size_t count, std::size_t last, const Call& call) {
    std::vector<const std::byte*> hops;
    for (std::size_t hop = 1; hop <= from.size(); ++hop)
      hops.push_back(from[(last + hop) % from.size()] + first * size_of(call.dtype));
    reduce(to, hops, count, call.dtype, call.op);
  }

  const std::shared_ptr<Comm> comm_;
  const std::vector<Call> calls_;
  const std::vector<Launches> launches_;
  const bool is_captured_;
  bool is_joint_ = false;
  std::uint64_t ticket_ = 0;
};

// ---- what is wrong with a group's calls on one communicator

struct Range {
  const std::byte* begin;
  std::size_t bytes;
  std::size_t call;
  bool overlaps(const Range& other) const {
    return bytes > 0 && other.bytes > 0 && begin < other.begin + other.bytes &&
           other.begin < begin + bytes;
  }
};

// NCCL's rule for calls in place: where a call's own input may lie in its output.
bool is_in_place(const Call& call, int rank) {
  const auto* const send = static_cast<const std::byte*>(call.send);
  const auto* const recv = static_cast<const std::byte*>(call.recv);
  const std::size_t own = static_cast<std::size_t>(rank) * bytes_of(call);
  switch (call.kind) {
    case Kind::all_reduce:
    case Kind::broadcast:
      return send == recv;
    case Kind::all_gather:
      return send == recv + own;
    case Kind::reduce_scatter:
      return recv == send + own;
    default:
      return false;
  }
}

}  // namespace

std::string overlap_in(const std::vector<Call>& calls, int rank, int ranks) {
  std::vector<Range> reads, writes;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const Call& c = calls[i];
    const bool fans_out = c.kind == Kind::all_gather || c.kind == Kind::all_to_all;
    const std::size_t bytes = bytes_of(c);
    if (c.kind != Kind::receive)
      reads.push_back(
          {static_cast<const std::byte*>(c.send), bytes * blocks_of(c, rank, ranks), i});
    if (c.kind != Kind::send)
      writes.push_back({static_cast<const std::byte*>(c.recv),
                        bytes * (fans_out ? static_cast<std::size_t>(ranks) : 1), i});
  }
  for (const Range& w : writes) {
    for (const Range& other : writes)
      if (w.call < other.call && w.overlaps(other))
        return std::string(name_of(calls[other.call].kind)) + " writes what " +
               name_of(calls[w.call].kind) + " of the same group writes";
    for (const Range& r : reads)
      if (w.overlaps(r) && (w.call != r.call || !is_in_place(calls[w.call], rank)))
        return std::string(name_of(calls[w.call].kind)) + " writes what " +
               (w.call == r.call
                    ? "it reads, and is not in place by NCCL's rule"
                    : std::string(name_of(calls[r.call].kind)) + " of the same group reads");
  }
  return {};
}

bool is_collective(Kind kind) { return kind != Kind::send && kind != Kind::receive; }

const char* name_of(Kind kind) {
  static constexpr const char* kNames[] = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter",
                                           "ncclBroadcast", "ncclAlltoAll",  "ncclSend",
                                           "ncclRecv"};
  return kNames[static_cast<int>(kind)];
}

void launch(const std::shared_ptr<Comm>& comm, std::vector<Call> calls,
            std::vector<Launches> launches, cudaStream_t stream) {
  const Control& gpu = *emulator();
  const bool is_captured = gpu.is_captured(stream);
  if (is_captured) {
    const std::lock_guard lock(comm->lineage->mutex);
    comm->lineage->is_captured = true;
    launches.clear();
  }
  ++totals().kernels;
  totals().calls += static_cast<long long>(calls.size());
  gpu.queue([](void* kernel) { static_cast<Kernel*>(kernel)->run(); },
            [](void* kernel) { delete static_cast<Kernel*>(kernel); },
            new Kernel(comm, std::move(calls), std::move(launches), is_captured), stream);
}

}  // namespace tessera::nccl_double
