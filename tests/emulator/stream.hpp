// Streams of the emulated GPU: work in order, on a host thread of their own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace tessera::kernels::cuda::emulator {

class Capture;

class Stream {
 public:
  explicit Stream(int device);
  // Runs what is queued first.
  ~Stream();
  // While the stream is captured, the capture gets it.
  void push(std::function<void()> work);
  // The caller sleeps until all that was pushed has run.
  void drain();
  int device() const { return device_; }
  // Null where it runs what it is given; else it is that stream of the capture.
  const std::shared_ptr<Capture>& capture() const { return capture_; }
  std::size_t captured_as() const { return captured_as_; }
  void set_capture(std::shared_ptr<Capture> capture, std::size_t captured_as);

  // From here on every piece of work of every stream starts late, by a random time up to `most_us`.
  static void delay(std::uint64_t seed, std::int32_t most_us);

 private:
  void work();
  const int device_;
  std::shared_ptr<Capture> capture_;
  std::size_t captured_as_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false, ends_ = false;
  std::thread worker_;
};

// Those of the driver's table; an error is one line.
const char* call_host(void (*function)(void* data), void* data, void* stream);
const char* delay(std::int64_t nanoseconds, void* stream);
// Control's.
void queue(void (*run)(void* data), void (*drop)(void* data), void* data, void* stream);

}  // namespace tessera::kernels::cuda::emulator
