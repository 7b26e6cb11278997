#include "tessera/device/collective_barrier.hpp"

#include <algorithm>

#include "tessera/base/error.hpp"

namespace tessera {

void AbortSignal::abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    reason_ = reason;
  }
  changed_.notify_all();
}

void AbortSignal::rearm() {
  const std::lock_guard lock(mutex_);
  aborted_ = false;
  reason_.clear();
}

bool AbortSignal::aborted() const {
  const std::lock_guard lock(mutex_);
  return aborted_;
}

std::string AbortSignal::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void CollectiveBarrier::enter() {
  std::unique_lock lock(abort_signal_.mutex_);
  if (abort_signal_.aborted_)
    throw CommError("collective: given up because " + abort_signal_.reason_);
  const std::uint64_t round = round_;
  if (++arrived_ == size_) {
    arrived_ = 0;
    inside_ = size_;
    ++round_;
    lock.unlock();
    abort_signal_.changed_.notify_all();
    return;
  }
  abort_signal_.changed_.wait(lock, [&] { return round_ != round || abort_signal_.aborted_; });
  if (round_ == round) throw CommError("collective: given up because " + abort_signal_.reason_);
}

// Nobody enters the next round before all have left this one, so `inside_` comes to 0 for each.
void CollectiveBarrier::leave() {
  std::unique_lock lock(abort_signal_.mutex_);
  if (--inside_ == 0) {
    given_up_ = abort_signal_.aborted_;
    abort_signal_.changed_.notify_all();
  } else {
    abort_signal_.changed_.wait(lock, [&] { return inside_ == 0; });
  }
  if (given_up_) throw CommError("collective: given up because " + abort_signal_.reason_);
}

// A group's barrier knows how many ranks it has, not which: each takes the next entry.
CollectiveBarrier::Marks& CollectiveBarrier::marks_of(int rank) {
  const std::lock_guard lock(abort_signal_.mutex_);
  const auto found = std::ranges::find_if(
      marks_, [rank](const Marks& marks) { return marks.rank == rank || marks.rank < 0; });
  TESSERA_EXPECT(found != marks_.end(), "CollectiveBarrier: rank ", rank, " is one more than its ",
                 size_);
  if (found->rank < 0) found->rank = rank;  // later, peers read it without the lock
  return *found;
}

void CollectiveBarrier::rearm() {
  const std::lock_guard lock(abort_signal_.mutex_);
  arrived_ = 0;
}

}  // namespace tessera
