// A thread whose stack has the same size wherever the program runs: others take it from the shell
// (ulimit -s), and get 400 kB, or 128, or 2 MiB for "unlimited".
#pragma once

#include <pthread.h>

#include <cstddef>
#include <memory>
#include <system_error>
#include <utility>

namespace tessera {

// Of address space: what is never touched takes no memory.
inline constexpr std::size_t kStackBytes = std::size_t{8} << 20;

// Runs `body`, which must not throw. Its end is waited for by `join` or the destructor.
class Thread {
 public:
  Thread() = default;
  // Throws: std::system_error where the system has no thread left.
  template <class F>
  explicit Thread(F body) {
    auto own = std::make_unique<F>(std::move(body));
    const auto run = [](void* given) noexcept -> void* {
      const std::unique_ptr<F> f(static_cast<F*>(given));
      (*f)();
      return nullptr;
    };
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    const int error = pthread_create(&thread_, &attributes, run, own.get());
    pthread_attr_destroy(&attributes);
    if (error != 0) throw std::system_error(error, std::generic_category());
    static_cast<void>(own.release());  // the thread's
    runs_ = true;
  }
  Thread(Thread&& other) noexcept
      : thread_(other.thread_), runs_(std::exchange(other.runs_, false)) {}
  Thread& operator=(Thread&& other) noexcept {
    std::swap(thread_, other.thread_);
    std::swap(runs_, other.runs_);
    return *this;
  }
  ~Thread() { join(); }

  void join() {
    if (std::exchange(runs_, false)) pthread_join(thread_, nullptr);
  }

 private:
  pthread_t thread_{};
  bool runs_ = false;
};

}  // namespace tessera
