#include "runtime/comm/nccl/nccl_replays.hpp"

#include <utility>

#include "tessera/base/error.hpp"

namespace tessera::comm {

void NcclReplays::add(std::uint64_t seq) {
  if (next_.first == 0) next_.first = seq;
  next_.last = seq;
}

void NcclReplays::launched(const Driver& driver, const Event& before, const Event& behind) {
  Replay made = std::exchange(next_, {});
  if (made.first == 0) return;
  made.driver = &driver;
  made.before = before;
  made.behind = behind;
  const std::lock_guard lock(mutex_);
  replays_.push_back(std::move(made));
}

void NcclReplays::for_each_call(const Replay& replay, Tell tell) const {
  FlightEntry call;
  for (std::uint64_t seq = replay.first; seq <= replay.last; ++seq)
    if (recorder_.find(seq, call)) (recorder_.*tell)(seq, call.stream);
}

const char* NcclReplays::look() {
  const std::lock_guard lock(mutex_);
  for (; !replays_.empty(); replays_.pop_front()) {
    Replay& replay = replays_.front();
    bool is_reached = false;
    if (replay.started_ns == 0) {
      const DriverError error = replay.driver->query(replay.before.native.get(), &is_reached);
      if (error || !is_reached) return error;
      replay.started_ns = monotonic_ns();
      for_each_call(replay, &FlightRecorder::started);
    }
    const DriverError error = replay.driver->query(replay.behind.native.get(), &is_reached);
    if (error || !is_reached) return error;
    for_each_call(replay, &FlightRecorder::done);
  }
  return nullptr;
}

std::string NcclReplays::late(double seconds) const {
  const std::lock_guard lock(mutex_);
  if (replays_.empty()) return "";
  const Replay& replay = replays_.front();
  if (replay.started_ns == 0 ||
      static_cast<double>(monotonic_ns() - replay.started_ns) <= seconds * 1e9)
    return "";
  FlightEntry first;
  return concat("the replay of a captured step, calls ", replay.first, " to ", replay.last,
                recorder_.find(replay.first, first) ? ", from " + first.to_string() : "",
                " on, has taken ", seconds, " s");
}

void NcclReplays::forget() {
  next_ = {};
  const std::lock_guard lock(mutex_);
  replays_.clear();
}

}  // namespace tessera::comm
