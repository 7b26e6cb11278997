// Time without a machine: every operation takes as long as the cost model says, on clocks that only
// advance. What the host submits gets its time at once, for a stream has no choice:
//
//   host     ── launch ── launch ── wait ── launch ──▶            host_seconds each
//   stream   ──────│ a         │ b      │╌╌╌╌╌╌│ c │             begins when the host has said so,
//   other    │ d                               │ record          the stream is free, and what it
//                                                                waits for has ended
//
// Bodies run only on request, one by one on the host thread. See CostModel and Machine for what a
// wire is.
#include <algorithm>
#include <array>
#include <deque>
#include <vector>

#include "runtime/device/executors/executors.hpp"
#include "runtime/device/executors/runner.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/device/machine.hpp"

namespace tessera {
namespace {

// What a machine's collectives do to each other and to compute. Whoever submits first goes first:
// the program's order is what the streams' order follows from, too.
class SharedLinks {
 public:
  // Of a collective that could begin at `ready`.
  double begin(double ready) const { return std::max(ready, last_end_); }
  void add(double begin, double end) {
    busy_.push_back({begin, end});
    last_end_ = end;
  }

  // The end of an operation of compute that begins at `now`, no earlier than the one before, and
  // would take `left` alone.
  double end_of_compute(double now, double left, double contention) {
    for (const double slower = 1 + contention; left > 0;) {
      while (!busy_.empty() && busy_.front().end <= now) busy_.pop_front();
      if (busy_.empty()) return now + left;
      const Span span = busy_.front();
      const double until = std::max(now, span.begin), alone = std::min(left, until - now);
      left -= alone;
      if (left <= 0) return now + alone;
      const double beside = (span.end - until) / slower;
      if (left <= beside) return until + left * slower;
      left -= beside;
      now = span.end;
    }
    return now;
  }

 private:
  struct Span {
    double begin, end;
  };
  std::deque<Span> busy_;  // in order, without those that compute has passed
  double last_end_ = 0;
};

class VirtualExecutor final : public Executor {
 public:
  VirtualExecutor(const ExecutorOptions& options, const Observers& observers)
      : cost_(options.cost),
        run_bodies_(options.run_bodies),
        report_(observers),
        runner_({.rank = options.rank, .threads = options.run_bodies ? options.threads : 1},
                observers) {}

  bool runs_bodies() const override { return run_bodies_; }

  void submit(StreamId stream, Tick tick, const Op& op, const Body& body,
              CollectiveBarrier* barrier) override {
    Timeline& line = lines_[index(stream)];
    const Operation operation{op.name, tick, stream, barrier, &body};
    line.now = std::max(line.now, host_);
    report_.launched(stream, tick, op, barrier);
    if (cost_.machine != nullptr && op.cost.wire_bytes > 0) line.now = links_.begin(line.now);
    runner_.begin(operation);
    if (run_bodies_) run(operation);
    line.now = end_of(stream, line.now, op.cost);
    line.ends.push_back(line.now);
    runner_.end(operation);
    host_ += cost_.machine != nullptr ? cost_.machine->host_seconds : cost_.host_seconds;
  }

  void record(Event& event) override { report_.recorded(event); }

  void wait(StreamId stream, const Event& event) override {
    report_.waited(stream, event);
    runner_.follow(stream, event.clock);
    Timeline& line = lines_[index(stream)];
    const double reached = std::max(line.now, host_);
    line.now = std::max(reached, end_of(event.clock));
    line.waited += line.now - reached;
  }

  // What the host has blocked on is past for every stream: nobody asks for its time again.
  void block(const Event& event) override {
    report_.blocked(event);
    host_ = std::max(host_, end_of(event.clock));
    for (std::size_t i = 0; i < kMaxStreams; ++i) lines_[i].forget(event.clock.ticks[i]);
    runner_.failure().rethrow();
  }
  Lost recover() override { return runner_.recover(); }

  double waited_seconds(StreamId stream) const override { return lines_[index(stream)].waited; }
  double seconds(StreamId stream) const override { return lines_[index(stream)].now; }
  double host_seconds() const override { return host_; }

 private:
  double end_of(StreamId stream, double begin, const Cost& cost) {
    if (cost_.machine == nullptr) return begin + cost_.seconds(cost);
    const double seconds = price(*cost_.machine, cost, stream).seconds;
    if (cost.wire_bytes > 0)
      links_.add(begin, begin + seconds);
    else if (stream == StreamId::compute)
      return links_.end_of_compute(begin, seconds, cost_.machine->contention);
    return begin + seconds;
  }

  void run(const Operation& operation) {
    if (operation.barrier == nullptr) return runner_.invoke(operation, Exec::Phase::run);
    runner_.fail(operation, std::make_exception_ptr(ContractError(concat(
                                "virtual: '", operation.name,
                                "' is a collective of several real ranks; bodies run in worlds of "
                                "one real rank, as World::emulated"))));
  }

  struct Timeline {
    double now = 0, waited = 0;
    std::vector<double> ends;  // of the operations from tick `forgotten + 1` on
    Tick forgotten = 0;

    double end(Tick tick) const {
      return tick > forgotten ? ends[static_cast<std::size_t>(tick - forgotten - 1)] : 0;
    }
    void forget(Tick tick) {
      if (tick <= forgotten) return;
      ends.erase(ends.begin(), ends.begin() + static_cast<std::ptrdiff_t>(tick - forgotten));
      forgotten = tick;
    }
  };

  double end_of(const Clock& clock) const {
    double end = 0;
    for (std::size_t i = 0; i < kMaxStreams; ++i)
      end = std::max(end, lines_[i].end(clock.ticks[i]));
    return end;
  }

  const CostModel cost_;
  const bool run_bodies_;
  const Report report_;
  Runner runner_;
  std::array<Timeline, kMaxStreams> lines_;
  SharedLinks links_;
  double host_ = 0;
};

}  // namespace

std::unique_ptr<Executor> make_virtual(const ExecutorOptions& options, const Observers& observers) {
  return std::make_unique<VirtualExecutor>(options, observers);
}

}  // namespace tessera
