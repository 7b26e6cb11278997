#include "tessera/detail/device/collective_barrier.hpp"

#include <algorithm>
#include <utility>

#include "tessera/base/error.hpp"

namespace tessera {

void AbortSignal::explain(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(aborted_, true)) reason_ = reason;
}

void AbortSignal::abort(const std::string& reason) {
  explain(reason);
  {
    const std::lock_guard lock(mutex_);
    is_final_ = true;
  }
  changed_.notify_all();
}

void AbortSignal::rearm() {
  const std::lock_guard lock(mutex_);
  aborted_ = is_final_ = false;
  reason_.clear();
}

bool AbortSignal::is_final() const {
  const std::lock_guard lock(mutex_);
  return is_final_;
}

bool AbortSignal::aborted() const {
  const std::lock_guard lock(mutex_);
  return aborted_;
}

std::string AbortSignal::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

bool CollectiveBarrier::gives_up() const {
  return is_broken_ || abort_signal_.is_final_ ||
         std::ranges::any_of(members_, [&](const Member& member) {
           return member.has_halted && member.committed <= round_;
         });
}

void CollectiveBarrier::throw_given_up() const {
  throw CommError("collective: given up because " + abort_signal_.reason_);
}

void CollectiveBarrier::enter() {
  std::unique_lock lock(abort_signal_.mutex_);
  if (gives_up()) throw_given_up();
  const std::uint64_t round = round_;
  if (++arrived_ == size_) {
    arrived_ = 0;
    inside_ = size_;
    ++round_;
    lock.unlock();
    abort_signal_.changed_.notify_all();
    return;
  }
  abort_signal_.changed_.wait(lock, [&] { return round_ != round || gives_up(); });
  if (round_ == round) throw_given_up();
}

// Nobody enters the next round before all have left this one, so `inside_` comes to 0 for each.
void CollectiveBarrier::leave() {
  std::unique_lock lock(abort_signal_.mutex_);
  if (--inside_ == 0) {
    given_up_ = is_broken_ || abort_signal_.is_final_;
    abort_signal_.changed_.notify_all();
  } else {
    abort_signal_.changed_.wait(lock, [&] { return inside_ == 0; });
  }
  if (given_up_) throw_given_up();
}

void CollectiveBarrier::give_up(const std::string& reason) {
  abort_signal_.explain(reason);
  {
    const std::lock_guard lock(abort_signal_.mutex_);
    is_broken_ = true;
  }
  abort_signal_.changed_.notify_all();
}

void CollectiveBarrier::commit(int member, std::uint64_t rounds) {
  const std::lock_guard lock(abort_signal_.mutex_);
  members_[static_cast<std::size_t>(member)].committed = rounds;
}

void CollectiveBarrier::halt(int member) {
  {
    const std::lock_guard lock(abort_signal_.mutex_);
    members_[static_cast<std::size_t>(member)].has_halted = true;
  }
  abort_signal_.changed_.notify_all();
}

bool CollectiveBarrier::is_given_up() const {
  const std::lock_guard lock(abort_signal_.mutex_);
  return gives_up();
}

void CollectiveBarrier::pass() {
  const std::lock_guard lock(abort_signal_.mutex_);
  ++round_;
}

// A group's barrier knows how many ranks it has, not which: each takes the next entry.
CollectiveBarrier::Marks& CollectiveBarrier::marks_of(int rank) {
  const std::lock_guard lock(abort_signal_.mutex_);
  const auto found = std::ranges::find_if(
      marks_, [rank](const Marks& marks) { return marks.rank == rank || marks.rank < 0; });
  TESSERA_EXPECT(found != marks_.end(), "CollectiveBarrier: rank ", rank,
                 " comes to a barrier whose ", size_, " places are taken");
  if (found->rank < 0) found->rank = rank;  // later, peers read it without the lock
  return *found;
}

void CollectiveBarrier::rearm() {
  const std::lock_guard lock(abort_signal_.mutex_);
  arrived_ = 0;
  round_ = 0;
  is_broken_ = false;
  std::ranges::fill(members_, Member{});
}

}  // namespace tessera
