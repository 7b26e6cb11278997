#include "tessera/device/joint.hpp"

#include "tessera/base/error.hpp"

namespace tessera {

void Meeting::abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    reason_ = reason;
  }
  changed_.notify_all();
}

void Meeting::rearm() {
  const std::lock_guard lock(mutex_);
  aborted_ = false;
  reason_.clear();
}

bool Meeting::aborted() const {
  const std::lock_guard lock(mutex_);
  return aborted_;
}

std::string Meeting::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void Joint::begin() {
  std::unique_lock lock(meeting_.mutex_);
  if (meeting_.aborted_) throw CommError("collective: given up because " + meeting_.reason_);
  const std::uint64_t round = round_;
  if (++arrived_ == size_) {
    arrived_ = 0;
    inside_ = size_;
    ++round_;
    lock.unlock();
    meeting_.changed_.notify_all();
    return;
  }
  meeting_.changed_.wait(lock, [&] { return round_ != round || meeting_.aborted_; });
  if (round_ == round) throw CommError("collective: given up because " + meeting_.reason_);
}

// Nobody begins the next round before all have ended this one, so `inside_` comes to 0 for each.
void Joint::end() {
  std::unique_lock lock(meeting_.mutex_);
  if (--inside_ == 0) {
    given_up_ = meeting_.aborted_;
    meeting_.changed_.notify_all();
  } else {
    meeting_.changed_.wait(lock, [&] { return inside_ == 0; });
  }
  if (given_up_) throw CommError("collective: given up because " + meeting_.reason_);
}

void Joint::rearm() {
  const std::lock_guard lock(meeting_.mutex_);
  arrived_ = 0;
}

}  // namespace tessera
