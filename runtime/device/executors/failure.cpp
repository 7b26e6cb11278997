#include "runtime/device/executors/failure.hpp"

#include <algorithm>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/text.hpp"

namespace tessera {

void Failure::keep(std::exception_ptr error, int rank, StreamId stream, const char* name) {
  const std::lock_guard lock(mutex_);
  if (error_) return;
  reason_ = concat("rank ", rank, ": '", name, "' on stream ", tessera::name(stream),
                   " failed: ", describe_exception(error, rank));
  error_ = std::move(error);
  happened_.store(true, std::memory_order_release);
}

void Failure::rethrow() const {
  if (!happened()) return;
  const std::lock_guard lock(mutex_);
  std::rethrow_exception(error_);
}

void Failure::lose(StreamId stream, Tick tick, bool has_failed) {
  const auto keep_least = [tick](Tick& least) {
    least = least == 0 ? tick : std::min(least, tick);
  };
  const std::lock_guard lock(mutex_);
  reached_[index(stream)].store(true, std::memory_order_release);
  if (tick == 0) return;
  keep_least(lost_.first[stream]);  // a GPU's `offload` is told of by two threads, in any order
  if (has_failed) keep_least(lost_.failed[stream]);
}

void Failure::follow(StreamId stream, const Clock& clock) {
  if (!happened() || reaches(stream)) return;
  const std::lock_guard lock(mutex_);
  for (const StreamId s : kStreams)
    if (lost_.first[s] > 0 && clock[s] >= lost_.first[s])
      reached_[index(stream)].store(true, std::memory_order_release);
}

Lost Failure::forget() {
  const std::lock_guard lock(mutex_);
  for (auto& reached : reached_) reached.store(false, std::memory_order_release);
  error_ = nullptr;
  reason_.clear();
  happened_.store(false, std::memory_order_release);
  return std::exchange(lost_, {});
}

std::string Failure::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

}  // namespace tessera
