#include "kernels/emulator/stream.hpp"

#include <utility>

#include "kernels/emulator/thread.hpp"

namespace tessera::kernels::cuda::emulator {

Stream::Stream() : worker_([this] { work(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

void Stream::push(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void Stream::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

void Stream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty() || ends_; });
    if (queue_.empty()) return;
    const std::function<void()> next = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    next();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void enqueue(void* native_stream, std::function<void()> work) {
  if (!native_stream) return work();
  static_cast<Stream*>(native_stream)->push(std::move(work));
}

}  // namespace tessera::kernels::cuda::emulator
