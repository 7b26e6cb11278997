// Threads inside a kernel. Kernels cut their work into tasks by shape alone, never by the number of
// threads. So a result has the same bits for any number of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tessera/device/op.hpp"

namespace tessera {

// Memory of the calling thread for one task of a kernel: kScratchBytes at a multiple of 64,
// uninitialised, valid until the task ends. With it kernels run on the small stacks of threads and
// fibers that are not ours. It is taken at a thread's first call, and given back when the thread
// ends. It is in no plan. Throws: std::bad_alloc, but not on a WorkerPool's threads: the pool takes
// theirs when it is made.
inline constexpr std::size_t kScratchBytes = std::size_t{1} << 21;
std::byte* thread_scratch();

// Gives the calling thread other scratch, and returns what it had. `other` must outlive its use;
// null: taken anew at the next call. It is for fibers, which share a thread and must not share
// scratch.
std::byte* exchange_thread_scratch(std::byte* other);

class WorkerPool {
 public:
  // `threads` counts the caller: a pool of 1 has no thread of its own.
  explicit WorkerPool(int threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int threads() const noexcept;

  // Calls task(context, i) for i in [0, count) on the pool's threads and the caller's, and returns
  // when all are done. If the pool is busy with another stream's kernel, the caller does all the
  // work. `task` must not throw.
  void run(std::int64_t count, void (*task)(void* context, std::int64_t i), void* context);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Calls f(i) for i in [0, count), on the threads of `exec`. Tasks must be independent, since their
// order is not defined.
template <class F>
void parallel_for(Exec& exec, std::int64_t count, F&& f) {
  if (exec.workers == nullptr || count <= 1) {
    for (std::int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  exec.workers->run(
      count,
      [](void* context, std::int64_t i) {
        (*static_cast<std::remove_reference_t<F>*>(context))(i);
      },
      &f);
}

}  // namespace tessera
