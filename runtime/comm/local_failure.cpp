// Ranks as threads that fail, end, or submit different calls: who hears what, and how they go on.
#include <algorithm>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/local.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::comm {

void LocalWorld::look_for_late_calls() {
  if (abort_signal_.is_final()) return;
  const std::lock_guard lock(mutex_);
  for (auto& [key, group] : groups_) look_for_late_calls(group);
}

void LocalWorld::look_for_late_calls(LocalGroup& group) {
  Recorders all;
  for (const FlightRecorder& recorder : group.recorders) all.push_back(&recorder);
  for (std::size_t rank = 0; rank < group.size(); ++rank)
    if (const std::string late =
            describe_late(all, static_cast<int>(rank), timeout_s_, group.ranks);
        !late.empty())
      return abort_signal_.abort(late);
}

void LocalWorld::submitting(LocalGroup& group, LocalRole& role, int rank, std::uint64_t number) {
  const FlightRecorder& own = group.recorder(rank);
  const std::uint64_t call = own.last_submitted();
  const std::lock_guard lock(mutex_);
  role.cells[static_cast<std::size_t>(rank)].submitted = number;
  for (std::size_t i = 0; i < group.size(); ++i) {
    const auto peer = static_cast<int>(i);
    const std::uint64_t theirs = group.recorders[i].fingerprint_after(call);
    if (theirs != 0 && theirs != own.fingerprint()) expect_same_role(group, rank, peer);
    if (!left_[static_cast<std::size_t>(group.ranks[i])]) continue;
    if (role.cells[i].submitted < number) abort_for_ended(group, role, peer, rank);
  }
}

// Of a rank that submits no more, and a peer that has submitted more on this communicator.
void LocalWorld::abort_for_ended(LocalGroup& group, const LocalRole& role, int ended, int peer) {
  FlightEntry missed;
  group.recorder(peer).find(group.recorder(ended).last_submitted() + 1, missed);
  abort_signal_.abort(concat(
      "rank ", group.name_of(ended), " has ended after ",
      role.cells[static_cast<std::size_t>(ended)].submitted, " calls on communicator '", role.name,
      "', but rank ", group.name_of(peer), " submitted call ",
      role.cells[static_cast<std::size_t>(peer)].submitted, " there; the first that is missing is ",
      missed.to_string(), "; every rank must submit the same collectives",
      backward_remedy(missed.progress.backward_of)));
}

// Ranks that disagree on one communicator meet there and hear more; on two they never would.
void LocalWorld::expect_same_role(LocalGroup& group, int rank, int peer) {
  const int low = std::min(rank, peer), high = std::max(rank, peer);
  const FlightRecorder &in_low = group.recorder(low), &in_high = group.recorder(high);
  FlightEntry a, b;
  if (first_difference(in_low, in_high, a, b) && (a.stream != b.stream || a.around != b.around))
    abort_signal_.abort(
        describe_difference(in_low, group.name_of(low), in_high, group.name_of(high)));
}

void LocalWorld::expect_same_size(LocalGroup& group, int rank, std::int64_t bytes,
                                  std::string_view purpose) {
  const std::lock_guard lock(mutex_);
  const std::size_t n = group.asked[static_cast<std::size_t>(rank)]++;
  if (n == group.allocations.size()) group.allocations.push_back({bytes, std::string(purpose)});
  const auto& [other_bytes, other_purpose] = group.allocations[n];
  TESSERA_EXPECT(other_bytes == bytes, "allocate_symmetric: rank ", group.name_of(rank),
                 " asks for ", bytes, " bytes for ", purpose, " in call ", n + 1,
                 ", another rank for ", other_bytes, " for ", other_purpose,
                 "; every rank must ask for the same");
}

void LocalWorld::commit(int rank) {
  for_each_role(rank, [](LocalRole& role, int member) {
    role.barrier.commit(member, role.cells[static_cast<std::size_t>(member)].submitted);
  });
}

void LocalWorld::halt(int rank, const std::string& reason) {
  abort_signal_.explain(reason);
  {
    const std::lock_guard lock(mutex_);
    halted_[static_cast<std::size_t>(rank)] = true;
  }
  for_each_role(rank, [](LocalRole& role, int member) { role.barrier.halt(member); });
}

void LocalWorld::end(int rank, const std::string& reason) {
  halt(rank, reason);
  recovery_signal_.abort(reason);
}

bool LocalWorld::is_echo(const std::string& what) const {
  const auto repeats = [&](const AbortSignal& abort_signal) {
    return abort_signal.aborted() && what.find(abort_signal.reason()) != std::string::npos;
  };
  return repeats(abort_signal_) || repeats(recovery_signal_);
}

void LocalWorld::rejoin(DeviceContext& context, int rank, std::span<double> largest) {
  Stream(context, StreamId::compute)
      .launch_collective({.name = "recover"}, &recovery_barrier_,
                         [this, rank, largest](Exec& exec) {
                           if (exec.phase == Exec::Phase::publish)
                             contribute(rank, largest);
                           else
                             all_reduce_max(largest), rearm();
                         });
  context.block(context.record(StreamId::compute));
}

void LocalWorld::contribute(int rank, std::span<const double> numbers) {
  std::copy(numbers.begin(), numbers.end(), contributed_[static_cast<std::size_t>(rank)].begin());
}

void LocalWorld::all_reduce_max(std::span<double> numbers) const {
  for (std::size_t i = 0; i < numbers.size(); ++i)
    for (const auto& other : contributed_) numbers[i] = std::max(numbers[i], other[i]);
}

// Each rank does the same, between `enter` and `leave` of the recovery's barrier: no rank is at
// another one.
void LocalWorld::rearm() {
  const std::lock_guard lock(mutex_);
  for (auto& [key, group] : groups_) {
    for (auto& [name, role] : group.roles) {
      role.barrier.rearm();
      for (LocalRole::Cell& cell : role.cells) cell.submitted = 0;
    }
    group.allocations.clear();
    std::ranges::fill(group.asked, 0);
  }
  std::fill(halted_.begin(), halted_.end(), false);
  abort_signal_.rearm();
}

void LocalWorld::expect_same_steps() {
  for (auto& [key, group] : groups_)
    for (const FlightRecorder& other : group.recorders)
      if (const std::string why =
              describe_steps(key.first, group.recorder(0).steps(), other.steps());
          !why.empty())
        throw CommError(why);
}

void LocalWorld::leave(int rank) {
  recovery_signal_.abort(concat("rank ", rank, " has ended"));
  const std::lock_guard lock(mutex_);
  left_[static_cast<std::size_t>(rank)] = true;
  for (auto& [key, group] : groups_) {
    const auto at = std::ranges::find(group.ranks, rank) - group.ranks.begin();
    if (at == std::ssize(group.ranks)) continue;
    for (const auto& [name, role] : group.roles)
      for (std::size_t peer = 0; peer < group.size(); ++peer)
        if (role.cells[peer].submitted > role.cells[static_cast<std::size_t>(at)].submitted)
          abort_for_ended(group, role, static_cast<int>(at), static_cast<int>(peer));
  }
}

}  // namespace tessera::comm
