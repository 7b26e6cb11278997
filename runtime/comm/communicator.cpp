// The part of a collective that is the same for every transport: order, the fingerprint, and the
// world of one rank.
#include "tessera/comm/communicator.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/item_checks.hpp"
#include "runtime/comm/pull.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/flight_recorder.hpp"
#include "tessera/detail/memory/step_memory.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace {

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

// One rank alone: what it sends is what it receives.
struct CopyAlone {
  comm::GroupCall call;
  void operator()(Exec& exec) const {
    const comm::ItemMover mover(exec);
    for (const Collective& c : call.items())
      if (c.count > 0) mover.copy(c.recv, c.send, comm::item_bytes(c));
  }
};

}  // namespace

const char* name(CollectiveKind kind) {
  constexpr const char* kNames[] = {"all_gather", "reduce_scatter", "all_reduce", "reduce",
                                    "broadcast",  "all_to_all",     "send_recv",  "barrier"};
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

void Communicator::count_step() noexcept {
  if (!has_ended_) recorder_.count_step();
}

void CollectiveGroup::place(const void* send, void* recv) {
  const auto distance = [](const void* from, const void* to) {
    return reinterpret_cast<std::intptr_t>(to) - reinterpret_cast<std::intptr_t>(from);
  };
  const std::intptr_t sends_by = distance(items_.front().send, send),
                      recvs_by = distance(items_.front().recv, recv);
  if (sends_by == 0 && recvs_by == 0) return;
  for (Collective& item : items_) {
    if (item.send) item.send = static_cast<const std::byte*>(item.send) + sends_by;
    if (item.recv) item.recv = static_cast<std::byte*>(item.recv) + recvs_by;
  }
  // Where all move alike, what was aligned, apart or in place stays so.
  if (sends_by != recvs_by || sends_by % std::intptr_t{alignof(std::max_align_t)} != 0)
    checked_ = {};
}

void Communicator::submit(const CollectiveGroup& group, std::span<const Access> accesses) {
  comm::CheckedItems& checked = group.checked_;
  if (checked.size != size() || checked.rank != rank())
    checked = comm::check_items(group.name, group.items_, rank(), size());
  submit_checked(group.items_, group.name, checked, accesses, &group);
}

void Communicator::submit(const Collective& collective, const char* op,
                          std::span<const Access> accesses) {
  const std::span<const Collective> items(&collective, 1);
  submit_checked(items, op, comm::check_items(op, items, rank(), size()), accesses, nullptr);
}

void Communicator::submit_checked(std::span<const Collective> items, const char* group,
                                  const comm::CheckedItems& checked,
                                  std::span<const Access> accesses,
                                  const CollectiveGroup* prepared) {
  TESSERA_EXPECT(!has_ended_, "Communicator::submit '", group, "': ", comm::kWorldHasEnded);
  const int size = seat_.size();
  Op op{.name = group, .cost = checked.cost, .accesses = accesses};
  op.cost.ranks = size;
  op.cost.rank_step = size > 1 ? std::abs(seat_.ranks[1] - seat_.ranks[0]) : 1;
  FlightEntry call;
  std::uint64_t content = mix(copy_and_fold(call.name, group, role_hash_), checked.content);
  comm::check_order(group, context_.clock(stream_), stream_, accesses);
  if (size == 1) {
    const CopyAlone copy{comm::GroupCall(call, 0, group, items, prepared != nullptr)};
    if (checked.moves) Stream(context_, stream_).launch(op, copy);
    return;
  }
  check_transport(group, items);
  const Collective& first = items.front();
  if (prepared) call.progress = prepared->progress;
  call.bytes = checked.bytes;
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
  record(call, content);
  if (context_.is_capturing()) record_at_replays(call, content, prepared);
  launch(op, comm::GroupCall(call, previous, group, items, prepared != nullptr));
}

void Communicator::record(FlightEntry& call, std::uint64_t content) {
  call.around = 0;
  for (const FlightRecorder* outer : seat_.around) {
    content = mix(content, outer->fingerprint());
    call.around += outer->last_submitted();
  }
  const Progress& p = call.progress;
  content = mix(content, (std::uint64_t{p.steps_of_each} << 32 | p.steps) ^
                             std::bit_cast<std::uint32_t>(p.divided_by) * 0x9e3779b97f4a7c15);
  recorder_.submit(call, content);
  ++submitted_;
}

// A peer may make the same step without a replay, and then compares.
void Communicator::record_at_replays(const FlightEntry& call, std::uint64_t content,
                                     const CollectiveGroup* prepared) {
  StepMemory* const step = StepMemory::of(context_);
  if (!step) return;
  std::function<Progress()> now;
  if (prepared) now = prepared->progress_at_replay;
  step->before_replay([this, call = call, content, now = std::move(now)]() mutable {
    TESSERA_EXPECT(!has_ended_, "captured step: '", call.name, "': ", comm::kWorldHasEnded);
    if (now) call.progress = now();
    record(call, content);
    will_replay(call.seq);
  });
}

void Communicator::will_replay(std::uint64_t seq) {
  recorder_.started(seq, stream_);
  recorder_.done(seq, stream_);
}

}  // namespace tessera
