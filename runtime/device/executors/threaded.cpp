// A queue and a worker thread for each stream. The host appends items of one size; nothing is
// allocated and no lock is taken for a launch.
//
//   host  ── submit ── submit ── wait ──▶ ring of 1024 items ──▶ worker: run, run, sleep
//                                                                  │
//   other workers, the blocking host  ◀── completed[stream] ───────┘  one counter per stream
//
// A wait is an item that carries the event's clock: the worker sleeps until every stream has
// completed what it names.
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

#include "runtime/base/thread.hpp"
#include "runtime/base/wait.hpp"
#include "runtime/device/executors/counter.hpp"
#include "runtime/device/executors/executors.hpp"
#include "runtime/device/executors/runner.hpp"

namespace tessera {
namespace {

constexpr std::uint64_t kCapacity = 1024;

struct QueueItem {
  enum class Kind : std::uint8_t { run, wait, stop };

  Body body;  // of `wait`: the bytes of a Clock
  Operation operation;
  Kind kind;
};
static_assert(sizeof(Clock) <= kBodyBytes);

// Ordered: completed[s] reaches a tick after the body's effects and `finished` calls, so that a
// thread which has seen the tick has seen those.
struct Progress {
  std::array<Counter, kMaxStreams> completed;

  bool covers(const Clock& clock) const {
    for (std::size_t i = 0; i < kMaxStreams; ++i)
      if (completed[i].load() < clock.ticks[i]) return false;
    return true;
  }
  void block(const Clock& clock) {
    if (covers(clock)) return;
    const Wait wait("the host waited for its device", [this] {
      std::uint64_t sum = 0;
      for (const Counter& counter : completed) sum += counter.load();
      return sum;
    });
    wait_for(clock);
  }
  void wait_for(const Clock& clock) {
    for (std::size_t i = 0; i < kMaxStreams; ++i) completed[i].wait_for(clock.ticks[i]);
  }
};

// One stream's ring and thread. Threads: `push` on the host only.
class Worker {
 public:
  Worker(Runner& runner, Progress& progress, StreamId stream)
      : runner_(runner),
        stream_(stream),
        progress_(progress),
        ring_(new QueueItem[kCapacity]),
        thread_([this] { drain(); }) {}
  ~Worker() {
    const Wait wait("a stream's thread did not end", [this] { return consumed_.load(); });
    push([](QueueItem& item) { item.kind = QueueItem::Kind::stop; });
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // `fill` writes the next item. Sleeps while the ring is full, until half of it is free.
  template <class Fill>
  void push(const Fill& fill) {
    if (pushed_ - consumed_seen_ == kCapacity) {
      consumed_seen_ = consumed_.load();
      if (pushed_ - consumed_seen_ == kCapacity) {
        const Wait wait("the host waited for its device", [this] { return consumed_.load(); });
        consumed_.wait_for(pushed_ - kCapacity / 2);
        consumed_seen_ = consumed_.load();
      }
    }
    fill(ring_[pushed_ % kCapacity]);
    submitted_.advance(++pushed_);
  }

  double waited_seconds() const { return waited_.load(std::memory_order_relaxed); }

 private:
  void drain() {
    for (std::uint64_t i = 0;; ++i) {
      submitted_.wait_for(i + 1);
      const QueueItem& item = ring_[i % kCapacity];
      const Operation& operation = item.operation;
      switch (item.kind) {
        case QueueItem::Kind::run:
          runner_.run(operation);
          progress_.completed[index(operation.stream)].advance(operation.tick);
          break;
        case QueueItem::Kind::wait:
          wait(item);
          break;
        case QueueItem::Kind::stop:
          return;
      }
      consumed_.advance(i + 1);
    }
  }

  void wait(const QueueItem& item) {
    Clock clock;
    std::memcpy(&clock, item.body.bytes, sizeof(clock));
    wait_for(clock);
    runner_.follow(stream_, clock);
  }

  void wait_for(const Clock& clock) {
    if (progress_.covers(clock)) return;
    const auto start = std::chrono::steady_clock::now();
    progress_.wait_for(clock);
    const std::chrono::duration<double> slept = std::chrono::steady_clock::now() - start;
    waited_.store(waited_.load(std::memory_order_relaxed) + slept.count(),
                  std::memory_order_relaxed);
  }

  Runner& runner_;
  const StreamId stream_;
  Progress& progress_;
  const std::unique_ptr<QueueItem[]> ring_;
  std::uint64_t pushed_ = 0, consumed_seen_ = 0;  // the host's
  Counter submitted_;                             // advanced by the host
  Counter consumed_;                              // advanced by the worker
  std::atomic<double> waited_{0};
  Thread thread_;  // last: it uses the rest
};

class ThreadedExecutor final : public Executor {
 public:
  ThreadedExecutor(const ExecutorOptions& options, const Observers& observers)
      : runner_(options, observers), report_(observers) {}

  bool runs_ahead() const override { return true; }

  void submit(StreamId stream, Tick tick, const Op& op, const Body& body,
              CollectiveBarrier* barrier) override {
    report_.launched(stream, tick, op, barrier);
    worker(stream).push([&](QueueItem& item) {
      item.body = body;
      item.operation = {op.name, tick, stream, barrier, &item.body};
      item.kind = QueueItem::Kind::run;
    });
  }

  // The CPU needs no mark in the stream: a waiter knows the ticks.
  void record(Event& event) override { report_.recorded(event); }

  void wait(StreamId stream, const Event& event) override {
    worker(stream).push([&](QueueItem& item) {
      std::memcpy(item.body.bytes, &event.clock, sizeof(event.clock));
      item.kind = QueueItem::Kind::wait;
    });
    report_.waited(stream, event);
  }

  // Waits first: whoever catches the failure may free what the skipped operations named.
  void block(const Event& event) override {
    progress_.block(event.clock);
    report_.blocked(event);
    runner_.failure().rethrow();
  }
  Lost recover() override { return runner_.recover(); }

  double waited_seconds(StreamId stream) const override {
    const auto& worker = workers_[index(stream)];
    return worker ? worker->waited_seconds() : 0;
  }

 private:
  Worker& worker(StreamId stream) {
    auto& worker = workers_[index(stream)];
    if (!worker) [[unlikely]]
      worker = std::make_unique<Worker>(runner_, progress_, stream);
    return *worker;
  }

  Runner runner_;
  Report report_;
  Progress progress_;
  std::array<std::unique_ptr<Worker>, kMaxStreams> workers_;  // last: its threads end first
};

}  // namespace

std::unique_ptr<Executor> make_threaded(const ExecutorOptions& options,
                                        const Observers& observers) {
  return std::make_unique<ThreadedExecutor>(options, observers);
}

}  // namespace tessera
