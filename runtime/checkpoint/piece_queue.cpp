#include "runtime/checkpoint/piece_queue.hpp"

#include <utility>

namespace tessera::checkpoint {

std::vector<std::byte>* PieceQueue::to_fill(std::chrono::steady_clock::duration time) {
  std::unique_lock lock(mutex_);
  const auto is_free = [&] { return filled_ - free_ < pieces_.size(); };
  changed_.wait_for(lock, time, [&] { return is_closed_ || is_free(); });
  return is_closed_ || !is_free() ? nullptr : &pieces_[filled_ % pieces_.size()];
}

void PieceQueue::fill() {
  const std::lock_guard lock(mutex_);
  ++filled_;
  changed_.notify_all();
}

void PieceQueue::fail(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  changed_.notify_all();
}

std::span<const std::byte> PieceQueue::take() {
  std::unique_lock lock(mutex_);
  free_ = taken_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return is_closed_ || filled_ > taken_ || error_; });
  if (is_closed_) return {};
  if (filled_ == taken_) std::rethrow_exception(error_);
  return pieces_[taken_++ % pieces_.size()];
}

void PieceQueue::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

bool PieceQueue::is_closed() const {
  const std::lock_guard lock(mutex_);
  return is_closed_;
}

}  // namespace tessera::checkpoint
