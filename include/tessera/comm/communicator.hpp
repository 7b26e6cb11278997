// Collectives between the ranks of a world: what is sent, and on which stream.
//
// A communicator is a group of ranks with a role and a stream. The sharding engine has one for
// gathers and one for reductions, so that neither waits behind the other. All ranks issue their
// collectives in one order, over all communicators; see group.hpp.
//
//   compute  ... grads of unit 3 ──┐ record                           ┌─ wait ── optimizer
//   reduce                         └─ wait ── reduce_scatter ── record┘
//
// Inputs that peers read (the send side) lie in symmetric memory. The communicator stages small
// ones itself; see kStagedBytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device.hpp"

namespace tessera {

enum class CollectiveKind : std::uint8_t {
  all_gather,
  reduce_scatter,
  all_reduce,
  reduce,
  broadcast,
  all_to_all,
  send_recv,
  barrier
};
const char* name(CollectiveKind kind);

// Whether the collective has a `root`: the rank that sends, or that gets the reduction.
constexpr bool has_root(CollectiveKind kind) {
  return kind == CollectiveKind::broadcast || kind == CollectiveKind::send_recv ||
         kind == CollectiveKind::reduce;
}

// How reduce_scatter, all_reduce and reduce combine values. A maximum is NaN if any value is.
enum class ReduceOp : std::uint8_t { sum, max };
const char* name(ReduceOp reduce);

struct FlightEntry;
class FlightRecorder;
namespace comm {
struct GroupCall;

// What rank `rank` of `size` has found in items without faults. A `size` of 0: nothing yet.
struct CheckedItems {
  int rank = 0, size = 0;
  Cost cost{};
  std::int64_t bytes = 0;     // each rank's chunk of all items
  std::uint64_t content = 0;  // a hash of what ranks agree on
  bool moves = false;         // whether bytes move when there is one rank alone
};
}  // namespace comm

// The name of the group of all ranks of a world.
inline constexpr const char* kWorldGroup = "world";

// One collective, as plain data. Counts are elements. The pointers say whether it is in place:
// all_gather with send at rank() * count elements of recv, reduce_scatter with recv there in send,
// the others with recv == send. Any other overlap is refused, also between the items of a group.
//
// send_recv is a send on one rank and its receive on another (NCCL: ncclSend, ncclRecv). Every rank
// submits it, as any collective. So a mismatch is an error that names both ranks, not a wait.
// `root` gives its send, `target` its recv. What other ranks give is ignored; they only enter and
// leave. Likewise only the root's recv counts in a reduce. Uneven all-to-alls are groups of
// send_recvs, at most kMostSendRecvs. Uneven gathers are groups of broadcasts, uneven
// reduce-scatters groups of reduces.
struct Collective {
  const void* send = nullptr;
  void* recv = nullptr;
  // all_gather: elements that each rank contributes; recv holds size() times as many, in rank
  // order. reduce_scatter: elements that each rank receives; send holds size() times as many.
  // all_to_all: elements from each rank for each rank; send and recv hold size() times as many, in
  // rank order. all_reduce, reduce, broadcast, send_recv: all elements.
  std::int64_t count = 0;
  CollectiveKind kind = CollectiveKind::barrier;
  DType dtype = DType::f32;
  ReduceOp reduce = ReduceOp::sum;
  int root = 0;    // broadcast, send_recv: the rank that sends; reduce: the one that receives
  int target = 0;  // send_recv: the rank that receives
};

// How far the rank that submits a collective has come, for messages; 0: not told. Ranks that differ
// in divided_by, steps or steps_of_each get the error of ranks that differ in the collective.
struct Progress {
  float divided_by = 0;             // the number by which the rank has divided what it sends
  std::uint32_t backward_of = 0;    // the number of the forward in whose backward it is
  std::uint32_t steps = 0;          // of optimizers; of a reduction, and steps the root has begun
  std::uint32_t steps_of_each = 0;  // a hash of each optimizer's steps, if there are several
};

// Collectives that are submitted as one operation, as often as needed. A communicator checks the
// items once; later submits may have them moved by `place`. They stay unchanged until the host
// knows that the submitted work has run. Sums are taken in rank order, in f32 for 16-bit types. So
// bits depend on the number of ranks only, unless RankGroup::sums_are_ordered says otherwise.
class CollectiveGroup {
 public:
  CollectiveGroup() = default;
  explicit CollectiveGroup(const char* called, std::vector<Collective> items = {})
      : name(called), items_(std::move(items)) {}

  const char* name = "";
  Progress progress{};
  // What `progress` is at each replay of a captured step that submits the group. Empty: the same.
  std::function<Progress()> progress_at_replay{};

  const std::vector<Collective>& items() const noexcept { return items_; }
  // The items, to be changed before the next submit, which checks all of them again.
  std::vector<Collective>& edit() noexcept {
    checked_ = {};
    return items_;
  }
  // Moves all sends by the distance that brings the first item's send to `send`, and all recvs
  // likewise to `recv`. Null sides stay null. Requires: a first item that has both.
  void place(const void* send, void* recv);

 private:
  friend class Communicator;
  std::vector<Collective> items_;
  mutable comm::CheckedItems checked_;
};

// How many bytes of a group's items a communicator stages, so that their buffers need not be
// symmetric. They are taken in order, each send side rounded up to 64 bytes; all_gather and
// reduce_scatter are not staged. Items that are not staged need a symmetric send, and an all_reduce
// or all_to_all then also a recv of its own. The send of a send_recv lies anywhere in symmetric
// memory, all others at the same offset on every rank.
inline constexpr std::int64_t kStagedBytes = 64 << 10;
inline constexpr std::int64_t kMostSendRecvs = kStagedBytes / 64;  // fewer if others are staged

// Memory at the same offset on every rank, which peers may read during a collective. It is made
// collectively. It is given back after the last collective that reads it, and before its world
// ends.
class SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;
  std::byte* data() const noexcept { return data_; }  // this rank's
  std::int64_t bytes() const noexcept { return bytes_; }

 protected:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// A rank's place in a group.
struct GroupSeat {
  std::string group;       // its name
  std::vector<int> ranks;  // their numbers in the world
  int rank = 0;            // this rank is ranks[rank]
  // The recorders of the groups around it, which hold all its ranks. A call of such a group comes
  // before, or after, a call of this group on all of its ranks alike.
  std::vector<const FlightRecorder*> around{};

  int size() const noexcept { return static_cast<int>(ranks.size()); }
};

// Ordered: collectives run in the order of submission, on `stream()`. Threads: the rank's host
// thread submits.
class Communicator {
 public:
  virtual ~Communicator() = default;

  int rank() const noexcept { return seat_.rank; }  // within the group
  int size() const noexcept { return seat_.size(); }
  std::span<const int> ranks() const noexcept { return seat_.ranks; }  // numbers in the world
  StreamId stream() const noexcept { return stream_; }
  // "gather", "gather of dp_shard"
  const std::string& role() const noexcept { return role_; }

  // Submits the group as one operation on `stream()`. `accesses` are this rank's buffers (all sends
  // and recvs). With one rank it copies what is out of place; if all is in place it does nothing,
  // and counts as no operation.
  //   Throws: ContractError for null or misaligned pointers, negative counts, overlaps, sends that
  // peers cannot read, and buffers to be written that another stream has touched without an edge to
  // this one.
  void submit(const CollectiveGroup& group, std::span<const Access> accesses);
  // Submits one collective by value, for calls that are not prepared. `name` has static lifetime.
  void submit(const Collective& collective, const char* name, std::span<const Access> accesses);

  // Operations submitted so far through this communicator. The group's FlightRecorder numbers those
  // of all its communicators.
  std::uint64_t submitted() const noexcept { return submitted_; }
  // See FlightRecorder.
  void count_step() noexcept;
  // Counts from 0 again. World::resume calls it on every rank.
  void restart() noexcept { submitted_ = 0; }
  void end() noexcept { has_ended_ = true; }  // from now on a submit is a ContractError

 protected:
  // `role` is its name within the group, as "gather"; role() adds the group's.
  Communicator(DeviceContext& context, FlightRecorder& recorder, const GroupSeat& seat,
               std::string_view role, StreamId stream);

  // Throws what this transport refuses, before the call counts.
  virtual void check_transport(const char* /*name*/, std::span<const Collective> /*items*/) const {}
  // Makes exactly one Stream::launch_collective, on stream(). The body carries a copy of `call`,
  // and tells the recorder when the call has started and when it is done.
  virtual void launch(const Op& op, const comm::GroupCall& call) = 0;
  // The next replay of a captured step has such a call, which is submitted as `seq`.
  virtual void will_replay(std::uint64_t seq);

  DeviceContext& context_;
  FlightRecorder& recorder_;

 private:
  void submit_checked(std::span<const Collective> items, const char* name,
                      const comm::CheckedItems& checked, std::span<const Access> accesses,
                      const CollectiveGroup* prepared);
  // Numbers the call, whose name and items are `content`.
  void record(FlightEntry& call, std::uint64_t content);
  void record_at_replays(const FlightEntry& call, std::uint64_t content,
                         const CollectiveGroup* prepared);

  GroupSeat seat_;
  std::string role_;
  std::uint64_t role_hash_;
  StreamId stream_;
  std::uint64_t submitted_ = 0;
  bool has_ended_ = false;
};

}  // namespace tessera
