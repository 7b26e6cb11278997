// Streams of a GPU, behind the driver table of a module. A body is called at once on the host
// thread and queues its work; only `block` and the barrier of a collective put the host to sleep.
//
//   host     ── launch ── record ──────── launch ── wait ── launch ──▶        never sleeps here
//   compute  ─────│ a     ● event of the pool  │ b                            priority 1
//   gather   ───────────────────────────────────────●──│ c                    priority 0
//
// Bodies of `offload` run on a thread of the driver's, when the stream of that name comes to them.
// See detail/device/collective_barrier.hpp for what a collective does.
#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/device/executors/cuda_events.hpp"
#include "runtime/device/executors/executors.hpp"
#include "runtime/device/executors/runner.hpp"
#include "runtime/device/testing.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/detail/device/captured_work.hpp"
#include "tessera/detail/device/driver.hpp"

namespace tessera {
namespace {

// What others wait for goes first.
std::int32_t priority(StreamId stream) {
  switch (stream) {
    case StreamId::gather:
    case StreamId::reduce:
    case StreamId::replicate:
      return 0;
    default:
      return 1;
  }
}

// Every fourth operation or so starts up to 60 us late: longer than a launch takes, so that other
// streams overtake it.
std::int64_t delay_ns(std::uint64_t seed, StreamId stream, Tick tick) {
  const auto words = philox(seed, tick, index(stream));
  return words[0] % 4 == 0 ? words[1] % 60'000 : 0;
}

class CudaExecutor final : public Executor {
 public:
  CudaExecutor(const ExecutorOptions& options, const Observers& observers)
      : driver_(*options.driver),
        index_(options.device_index),
        runner_(options, observers),
        report_(observers),
        events_(driver_, driver_.make_event),
        timers_(driver_, driver_.make_timer) {
    runner_.exec_on(StreamId::offload).driver = nullptr;
  }
  ~CudaExecutor() override {
    driver_.use(index_);
    for (void* stream : streams_)
      if (stream) driver_.end_stream(stream);
  }

  bool runs_ahead() const override { return true; }
  // See delay_operations in runtime/device/testing.hpp. 0: none.
  void delay_by(std::uint64_t seed) { delay_seed_ = seed; }
  void set_workspace(StreamId stream, void* data, std::size_t bytes) override {
    runner_.exec_on(stream).workspace = data;
    runner_.exec_on(stream).workspace_bytes = bytes;
  }

  void submit(StreamId stream, Tick tick, const Op& op, const Body& body,
              CollectiveBarrier* barrier) override {
    void* const native = native_of(stream);
    if (captures_now_)
      if (const char* const why = uncapturable(stream, barrier))
        throw ContractError(concat("captured step: '", op.name, "': ", why));
    report_.launched(stream, tick, op, barrier);
    const Operation operation{op.name, tick, stream, barrier, &body};
    submitted_[stream] = tick;
    if (runner_.failure().happened()) return runner_.skip(operation);
    if (delay_seed_ != 0) delay(operation, native);
    if (stream == StreamId::offload) return call_on_host(operation, native);
    const std::shared_ptr<void> begin = timer(native);
    if (!begin) runner_.begin(operation);
    if (barrier)
      run_together(operation, native);
    else
      runner_.invoke(operation, Exec::Phase::run);
    if (begin)
      timed_.push_back({op.name, stream, tick, begin, timer(native)});
    else
      runner_.end(operation);
  }

  void record(Event& event) override {
    void* const native = native_of(event.stream);
    event.native = captures_now_ ? captured_.emplace_back(make_event(driver_)) : events_.take();
    check_driver(driver_.record(event.native.get(), native), "an event could not be recorded");
    report_.recorded(event);
  }

  void wait(StreamId stream, const Event& event) override {
    if (event.native) {
      void* const native = native_of(stream);
      const bool measured = measures_waits_[index(stream)] && event.stream != stream;
      const std::shared_ptr<void> begin = measured ? timer_on(native) : nullptr;
      check_driver(driver_.wait(native, event.native.get()), "a stream could not wait");
      if (begin) waits_.push_back({stream, submitted_[stream], begin, timer_on(native)});
    }
    report_.waited(stream, event);
  }

  // The device is asked only for what the host does not know yet. Sleeps first: whoever catches the
  // failure may free what the skipped operations named.
  void block(const Event& event) override {
    sure_ = known_;
    if (event.native && !known_.covers(event.clock)) {
      driver_.use(index_);
      DriverError error = driver_.block(reachable(event.native));
      if (!error) error = driver_.failure();
      if (error) fail_somewhere(error);
      known_.merge(event.clock);
      report_.blocked(event);
    }
    if (!timed_.empty()) [[unlikely]]
      tell_times();
    if (!waits_.empty()) [[unlikely]]
      count_waits();
    runner_.failure().rethrow();
  }
  void fail_unseen(const std::exception_ptr& error) override {
    known_ = sure_;
    unsure_ = submitted_;
    lose("a collective", error);
  }
  Lost recover() override {
    known_ = sure_ = submitted_;
    timed_.clear();
    waits_.clear();
    Lost lost = runner_.recover();
    lost.unsure = std::exchange(unsure_, {});
    return lost;
  }

  // Timers, delays and bodies of the host cannot be in a graph.
  bool captures() const override { return !times_ && delay_seed_ == 0 && !measures_a_wait(); }
  void begin_capture() override {
    void* const compute = native_of(StreamId::compute);
    for (std::size_t i = 0; i < kMaxStreams; ++i) native_of(static_cast<StreamId>(i));
    std::erase_if(captured_, [](const auto& event) { return event.use_count() == 1; });
    check_driver(driver_.begin_capture(compute), "a capture could not begin");
    captures_now_ = true;
    for_others([&](void* other) { order(compute, other); });
  }
  std::shared_ptr<void> end_capture(bool drops) override {
    void *const compute = native_of(StreamId::compute), *graph = nullptr;
    captures_now_ = false;
    if (!drops) for_others([&](void* other) { order(other, compute); });
    const DriverError error = driver_.end_capture(compute, &graph);
    std::shared_ptr<void> made(graph, [&driver = driver_](void* g) {
      if (g) driver.end_graph(g);
    });
    if (drops) {
      mark_replayed();
      lose("captured_step", std::make_exception_ptr(DeviceError(
                                "captured step: an exception has ended it, and nothing of it has "
                                "run")));
      return nullptr;
    }
    runner_.failure().rethrow();
    check_driver(error, "what was captured makes no graph");
    return made;
  }
  void replay(void* graph, const Clock& end) override {
    check_driver(driver_.launch_graph(graph, native_of(StreamId::compute)),
                 "a graph could not be launched");
    submitted_ = end;
    mark_replayed();
  }

  void time_operations(bool times) override {
    times_ = times;
    if (!times || origin_) return;
    origin_ = timer(native_of(StreamId::compute));
    check_driver(driver_.block(origin_.get()), "a timer could not be reached");
    origin_seconds_ = host_seconds();
  }
  double seconds(StreamId stream) const override {
    return stream == StreamId::offload || now_ < 0 ? host_seconds() : now_;
  }

  // The first question about a stream begins the measuring, and its answer is 0: who never asks has
  // no timers in the stream. Counts what the host has blocked on, and with each wait the
  // microsecond or two that lie between two timers anyway.
  double waited_seconds(StreamId stream) const override {
    measures_waits_[index(stream)] = true;
    return waited_[index(stream)];
  }

 private:
  // A body of `offload` from its submission until it has run.
  struct HostCall {
    Runner& runner;
    Operation operation{};
    Body body{};
    std::atomic<bool> has_run{false};

    static void run(void* call) {
      auto& self = *static_cast<HostCall*>(call);
      self.runner.run(self.operation);
      self.has_run.store(true, std::memory_order_release);
    }
  };

  // They run in order: where the first has not, none has, and one more is made.
  void call_on_host(const Operation& operation, void* native) {
    if (!host_calls_.empty() && host_calls_.front()->has_run.load(std::memory_order_acquire)) {
      host_calls_.push_back(std::move(host_calls_.front()));
      host_calls_.pop_front();
    } else {
      host_calls_.push_back(std::make_unique<HostCall>(runner_));
    }
    HostCall& call = *host_calls_.back();
    call.operation = operation;
    call.body = *operation.body;
    call.operation.body = &call.body;
    call.has_run.store(false, std::memory_order_relaxed);
    const DriverError error = driver_.call_host(&HostCall::run, &call, native);
    if (!error) return;
    call.has_run.store(true, std::memory_order_relaxed);
    check_driver(error, "a call of the host could not be queued");
  }

  // Also makes the device the calling thread's: each call of the driver acts on that.
  void* native_of(StreamId stream) {
    check_driver(driver_.use(index_), "the device could not be used");
    void*& native = streams_[index(stream)];
    if (!native) [[unlikely]] {
      check_driver(driver_.make_stream(priority(stream), &native), "a stream could not be made");
      runner_.exec_on(stream).native_stream = native;
    }
    return native;
  }

  // See detail/device/collective_barrier.hpp. A peer's event is waited for after the barrier that
  // follows its record, and recorded again only after the next one: what is waited for is always
  // recorded. A rank that fails in the run phase still marks its end, and waits for its peers':
  // they may be reading its bytes.
  void run_together(const Operation& operation, void* native) {
    try {
      CollectiveBarrier& barrier = *operation.barrier;
      CollectiveBarrier::Marks& mine = barrier.marks_of(runner_.rank());
      if (!mine.ready) {
        mine.ready = make_event(driver_);
        mine.done = make_event(driver_);
      }
      runner_.invoke(operation, Exec::Phase::publish);
      runner_.failure().rethrow();
      mark(mine.ready, native);
      barrier.enter();
      const std::exception_ptr given_up = run_begun(operation, barrier, native);
      wait_for_peers(barrier, native, &CollectiveBarrier::Marks::done);
      if (given_up) std::rethrow_exception(given_up);
    } catch (...) {
      if (!runner_.failure().happened()) runner_.fail(operation, std::current_exception());
    }
  }

  // Until the barrier is left, whatever happens. What it threw, or null.
  std::exception_ptr run_begun(const Operation& operation, CollectiveBarrier& barrier,
                               void* native) {
    try {
      wait_for_peers(barrier, native, &CollectiveBarrier::Marks::ready);
      runner_.invoke(operation, Exec::Phase::run);
      mark(barrier.marks_of(runner_.rank()).done, native);
    } catch (...) {
      runner_.fail(operation, std::current_exception());
    }
    try {
      barrier.leave();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  bool measures_a_wait() const {
    return std::any_of(measures_waits_.begin(), measures_waits_.end(), [](bool m) { return m; });
  }
  // The streams of the device but compute.
  template <class F>
  void for_others(F f) {
    for (std::size_t i = 0; i < kMaxStreams; ++i)
      if (static_cast<StreamId>(i) != StreamId::compute) f(streams_[i]);
  }
  // What is captured of `to` from here on comes after what was captured of `from`.
  void order(void* from, void* to) {
    mark(captured_.emplace_back(make_event(driver_)), from);
    check_driver(driver_.wait(to, captured_.back().get()), "a stream could not wait");
  }
  void mark_replayed() {
    if (!replayed_) replayed_ = make_event(driver_);
    mark(replayed_, native_of(StreamId::compute));
  }
  // An event of a capture is in no stream, but in each replay: the last one's end comes after it.
  void* reachable(const std::shared_ptr<void>& native) const {
    const bool was_captured =
        std::find(captured_.begin(), captured_.end(), native) != captured_.end();
    return was_captured ? replayed_.get() : native.get();
  }

  void mark(const std::shared_ptr<void>& event, void* native) const {
    check_driver(driver_.record(event.get(), native), "an event could not be recorded");
  }

  void wait_for_peers(CollectiveBarrier& barrier, void* native,
                      std::shared_ptr<void> CollectiveBarrier::Marks::* mark) const {
    for (const CollectiveBarrier::Marks& peer : barrier.marks())
      if (peer.rank != runner_.rank())
        check_driver(driver_.wait(native, (peer.*mark).get()), "a stream could not wait");
  }

  void delay(const Operation& operation, void* native) {
    const std::int64_t ns = delay_ns(delay_seed_, operation.stream, operation.tick);
    if (ns > 0) check_driver(driver_.delay(ns, native), "a stream could not be delayed");
  }

  // A timer recorded on the stream; null where nobody wants times.
  std::shared_ptr<void> timer(void* native) {
    if (!times_) [[likely]]
      return nullptr;
    return timer_on(native);
  }
  std::shared_ptr<void> timer_on(void* native) {
    std::shared_ptr<void> taken = timers_.take();
    check_driver(driver_.record(taken.get(), native), "a timer could not be recorded");
    return taken;
  }

  double device_seconds(void* timer) const {
    double since = 0;
    check_driver(driver_.elapsed(origin_.get(), timer, &since), "a timer could not be read");
    return origin_seconds_ + since;
  }

  // Of the operations that the host knows to be over, in the order of their submission.
  void tell_times() {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < timed_.size(); ++i) {
      TimedOperation& t = timed_[i];
      if (t.tick > known_[t.stream]) {
        if (kept != i) timed_[kept] = std::move(t);
        ++kept;
        continue;
      }
      const Operation operation{t.name, t.tick, t.stream, nullptr, nullptr};
      now_ = device_seconds(t.begin.get());
      runner_.begin(operation);
      now_ = device_seconds(t.end.get());
      runner_.end(operation);
    }
    timed_.resize(kept);
    now_ = -1;
  }

  void count_waits() {
    std::erase_if(waits_, [&](const TimedWait& w) {
      if (w.after >= known_[w.stream]) return false;  // the host may not have seen its end
      double seconds = 0;
      check_driver(driver_.elapsed(w.begin.get(), w.end.get(), &seconds),
                   "a timer could not be read");
      waited_[index(w.stream)] += seconds;
      return true;
    });
  }

  // A kernel has failed on the device: one of all that the host had not seen the end of.
  void fail_somewhere(DriverError error) {
    unsure_ = submitted_;
    lose("a kernel before this point",
         std::make_exception_ptr(
             DeviceError(concat("cuda: a kernel failed on the device: ", error,
                                "; run with CUDA_LAUNCH_BLOCKING=1 to learn which one"))));
  }
  void lose(const char* name, std::exception_ptr error) {
    runner_.fail({.name = name}, std::move(error));
    for (std::size_t i = 0; i < kMaxStreams; ++i)
      if (const auto s = static_cast<StreamId>(i); submitted_[s] > known_[s])
        runner_.lose(s, known_[s] + 1);
  }

  const Driver& driver_;
  const int index_;
  Runner runner_;
  std::uint64_t delay_seed_ = 0;  // 0 but in tests
  const Report report_;
  EventPool events_, timers_;
  std::array<void*, kMaxStreams> streams_{};
  Clock submitted_, known_;                           // known_: what the host has blocked on
  Clock sure_;                                        // known_ before the last `block`
  Clock unsure_;                                      // see Lost
  std::deque<std::unique_ptr<HostCall>> host_calls_;  // from the oldest
  // See begin_capture.
  bool captures_now_ = false;
  std::vector<std::shared_ptr<void>> captured_;  // events, never recorded again
  std::shared_ptr<void> replayed_;               // the end of the last replay
  // See Executor::time_operations.
  bool times_ = false;
  std::vector<TimedOperation> timed_;
  std::shared_ptr<void> origin_;
  double origin_seconds_ = 0;
  double now_ = -1;  // while an observer hears of a time
  // See waited_seconds.
  mutable std::array<bool, kMaxStreams> measures_waits_{};
  std::vector<TimedWait> waits_;
  std::array<double, kMaxStreams> waited_{};
};

}  // namespace

void delay_operations(DeviceContext& context, std::uint64_t seed) {
  auto* const executor = dynamic_cast<CudaExecutor*>(&context.executor());
  TESSERA_EXPECT(executor != nullptr, "delay_operations: only a GPU's operations can start late");
  executor->delay_by(fnv1a(seed, static_cast<unsigned>(context.rank()) + 1u));
}

std::unique_ptr<Executor> make_cuda(const ExecutorOptions& options, const Observers& observers) {
  return std::make_unique<CudaExecutor>(options, observers);
}

}  // namespace tessera
