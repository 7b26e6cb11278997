#include "tessera/device/workers.hpp"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "runtime/base/thread.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

constexpr std::align_val_t kScratchAlignment{64};

struct FreeScratch {
  void operator()(std::byte* p) const { ::operator delete[](p, kScratchAlignment); }
};
using Scratch = std::unique_ptr<std::byte[], FreeScratch>;

Scratch make_scratch() { return Scratch(new (kScratchAlignment) std::byte[kScratchBytes]); }

thread_local Scratch own_scratch;
constinit thread_local std::byte* scratch = nullptr;  // own_scratch's, or a fiber's

}  // namespace

std::byte* thread_scratch() {
  if (scratch == nullptr) scratch = (own_scratch = make_scratch()).get();
  return scratch;
}

std::byte* exchange_thread_scratch(std::byte* other) { return std::exchange(scratch, other); }

// Threads take part in a kernel only while it is open: one that wakes late finds it closed and goes
// back to sleep, so the caller never waits for a thread that has done nothing.
struct WorkerPool::State {
  std::mutex busy;  // held by the stream whose kernel has the pool

  std::mutex mutex;
  std::condition_variable opened, left;
  bool open = false, stop = false;
  std::uint64_t kernel = 0;  // how many were opened
  int inside = 0;            // threads, without the caller, that may touch `task`

  std::atomic<std::int64_t> next{0};
  std::int64_t count = 0;
  void (*task)(void*, std::int64_t) = nullptr;
  void* context = nullptr;

  std::vector<Thread> threads;

  // Here, so that those that were started end where the system has no thread for the next one.
  ~State() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    opened.notify_all();
    for (Thread& thread : threads) thread.join();
  }

  void work() {
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
      task(context, i);
  }

  void thread_main(Scratch mine) {
    own_scratch = std::move(mine);
    scratch = own_scratch.get();
    std::unique_lock lock(mutex);
    for (std::uint64_t seen = 0;;) {
      opened.wait(lock, [&] { return stop || (open && kernel != seen); });
      if (stop) return;
      seen = kernel;
      ++inside;
      lock.unlock();
      work();
      lock.lock();
      if (--inside == 0) left.notify_one();
    }
  }
};

WorkerPool::WorkerPool(int threads) : state_(std::make_unique<State>()) {
  TESSERA_EXPECT(threads >= 1, "WorkerPool: ", threads,
                 " threads; at least 1, the caller, is needed");
  for (int i = 1; i < threads; ++i)
    state_->threads.emplace_back([state = state_.get(), mine = make_scratch()]() mutable {
      state->thread_main(std::move(mine));
    });
}

WorkerPool::~WorkerPool() = default;

int WorkerPool::threads() const noexcept { return static_cast<int>(state_->threads.size()) + 1; }

void WorkerPool::run(std::int64_t count, void (*task)(void*, std::int64_t), void* context) {
  State& s = *state_;
  const std::unique_lock busy(s.busy, std::try_to_lock);
  if (!busy.owns_lock() || s.threads.empty() || count <= 1) {
    for (std::int64_t i = 0; i < count; ++i) task(context, i);
    return;
  }
  {
    const std::lock_guard lock(s.mutex);
    s.task = task;
    s.context = context;
    s.count = count;
    s.next.store(0, std::memory_order_relaxed);
    s.open = true;
    ++s.kernel;
  }
  if (count > static_cast<std::int64_t>(s.threads.size())) {
    s.opened.notify_all();
  } else {
    for (std::int64_t i = 1; i < count; ++i) s.opened.notify_one();
  }
  s.work();
  std::unique_lock lock(s.mutex);
  s.open = false;
  s.left.wait(lock, [&] { return s.inside == 0; });
}

}  // namespace tessera
