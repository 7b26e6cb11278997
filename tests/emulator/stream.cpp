#include "tests/emulator/stream.hpp"

#include <atomic>
#include <chrono>
#include <utility>

#include "tests/emulator/gpu_thread.hpp"
#include "tests/emulator/graph.hpp"

namespace tessera::kernels::cuda::emulator {
namespace {

std::atomic<std::uint64_t> delay_state{0};
std::atomic<std::int32_t> delay_us{0};

// Half of the work is not delayed at all, so that streams overtake each other by much.
void sleep_a_while() {
  const std::int32_t most = delay_us.load();
  if (most == 0) return;
  std::uint64_t draw = delay_state.fetch_add(0x9e3779b97f4a7c15ull);  // splitmix64
  draw = (draw ^ (draw >> 30)) * 0xbf58476d1ce4e5b9ull;
  draw = (draw ^ (draw >> 27)) * 0x94d049bb133111ebull;
  draw ^= draw >> 31;
  if (draw % 2 == 0)
    std::this_thread::sleep_for(std::chrono::microseconds(draw / 2 % static_cast<unsigned>(most)));
}

}  // namespace

void Stream::delay(std::uint64_t seed, std::int32_t most_us) {
  delay_state = seed;
  delay_us = most_us;
}

Stream::Stream(int device) : device_(device), worker_([this] { work(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

void Stream::set_capture(std::shared_ptr<Capture> capture, std::size_t captured_as) {
  capture_ = std::move(capture);
  captured_as_ = captured_as;
}

void Stream::push(std::function<void()> work) {
  if (capture_) return capture_->add(captured_as_, std::move(work));
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
    sleep_a_while();
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

const char* call_host(void (*function)(void* data), void* data, void* stream) {
  if (const char* const refused = refusal(stream, nullptr, 0)) return refused;
  enqueue(stream, [=] { function(data); });
  return nullptr;
}

const char* delay(std::int64_t nanoseconds, void* stream) {
  if (const char* const refused = refusal(stream, nullptr, 0)) return refused;
  enqueue(stream, [=] { std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds)); });
  return nullptr;
}

void queue(void (*run)(void* data), void (*drop)(void* data), void* data, void* stream) {
  enqueue(stream, [run, owned = std::shared_ptr<void>(data, drop)] { run(owned.get()); });
}

}  // namespace tessera::kernels::cuda::emulator
