// Ranks as threads that fail, end, or submit different calls: who hears what, and how they go on.
#include <algorithm>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/local.hpp"
#include "tessera/base/error.hpp"

namespace tessera::comm {

// Of a rank that submits no more, and a peer that has submitted more on this communicator.
void LocalWorld::abort_for_ended(const LocalRole& role, int ended, int peer) {
  FlightEntry missed;
  recorder(peer).find(recorder(ended).last_submitted() + 1, missed);
  abort_signal_.abort(concat(
      "rank ", ended, " has ended after ", role.cells[static_cast<std::size_t>(ended)].submitted,
      " calls on communicator '", role.name, "', but rank ", peer, " submitted call ",
      role.cells[static_cast<std::size_t>(peer)].submitted, " there, and first ",
      missed.to_string(), "; every rank must submit the same collectives",
      backward_remedy(missed.backward_of)));
}

// Ranks that disagree on one communicator meet there and hear more; on two they never would.
void LocalWorld::expect_same_group(int rank, int peer) {
  const int low = std::min(rank, peer), high = std::max(rank, peer);
  FlightEntry in_low, in_high;
  if (first_difference(recorder(low), recorder(high), in_low, in_high) &&
      in_low.stream != in_high.stream)
    abort_signal_.abort(describe_difference(recorder(low), low, recorder(high), high));
}

void LocalWorld::end(const std::string& reason) {
  abort_signal_.abort(reason);
  recovery_signal_.abort(reason);
}

bool LocalWorld::is_echo(const std::string& what) const {
  const auto repeats = [&](const AbortSignal& abort_signal) {
    return abort_signal.aborted() && what.find(abort_signal.reason()) != std::string::npos;
  };
  return repeats(abort_signal_) || repeats(recovery_signal_);
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
  for (const auto& [name, role] : roles_) {
    role->barrier.rearm();
    for (LocalRole::Cell& cell : role->cells) cell.submitted = 0;
  }
  allocations_.clear();
  abort_signal_.rearm();
}

void LocalWorld::leave(int rank) {
  recovery_signal_.abort(concat("rank ", rank, " has ended"));
  const std::lock_guard lock(mutex_);
  left_[static_cast<std::size_t>(rank)] = true;
  for (const auto& [name, role] : roles_) {
    const std::uint64_t mine = role->cells[static_cast<std::size_t>(rank)].submitted;
    for (int peer = 0; peer < size_; ++peer) {
      const std::uint64_t theirs = role->cells[static_cast<std::size_t>(peer)].submitted;
      if (theirs > mine) abort_for_ended(*role, rank, peer);
    }
  }
}

}  // namespace tessera::comm
