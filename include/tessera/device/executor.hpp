// Executors, which say what submitting means. An executor hears of launches, records and waits in
// the order of the host program, and decides when bodies run. Nothing above the device layer knows
// which one is at work.
//
//   threaded   a queue and a worker thread per stream: real overlap on the CPU
//   inline     at once, on the host thread
//   virtual    at once on a clock of its own, by a cost model; bodies run only on request: planning
//   cuda       on streams of a device, behind the driver of a module
//
// Note [What an executor promises]
// 1. Bodies of one stream run in the order of submission, one at a time.
// 2. What is submitted to a stream after `wait` runs after everything in the event's clock. Every
//    edge points back in the host program, so the order of that program is always right.
// 3. `block` returns when everything that the event's clock covers has run. If a body threw, each
//    `block` throws its exception, until `recover`. The bodies behind it are skipped.
// 4. `submit` copies the body: 128 bytes that own nothing. Op::name stays as long as the device;
//    Op::accesses is gone when `submit` returns.
// 5. The body of a collective runs twice, before and after CollectiveBarrier::enter; see
//    detail/device/collective_barrier.hpp.
// 6. Observers hear of `executor_*` as each is done, in the order of the host program. They hear of
//    `started` and `finished` around each body.
// tests/tour/100_your_own_executor.cpp is an executor on public headers.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "tessera/detail/device/collective_barrier.hpp"
#include "tessera/detail/device/cost_model.hpp"
#include "tessera/device/event.hpp"
#include "tessera/device/observer.hpp"
#include "tessera/device/op.hpp"

namespace tessera {

enum class ExecutorKind : std::uint8_t { threaded, inlined, virtual_, cuda };

// "threaded", "inline", "virtual", "cuda".
std::string_view name(ExecutorKind kind);

// What a failure kept from running, because it comes after it. On each stream this is everything
// from `first` on; 0: nothing. `inlined` has one thread, so all that is submitted behind the
// failure comes after it.
struct Lost {
  Clock first;   // failed or skipped
  Clock failed;  // that failed in its body, which may have begun to write
  // Up to here a GPU was given what is lost, and has perhaps run it.
  Clock unsure{};
};

class Executor {
 public:
  virtual ~Executor() = default;

  // Whether bodies run. If not, it plans: memory is counted and never touched.
  virtual bool runs_bodies() const { return true; }
  // Whether bodies run while the host goes on. Then the time between two `block`s is that of
  // submitting.
  virtual bool runs_ahead() const { return false; }

  // Runs `body` on `stream` after everything submitted to it before. `barrier` is set for
  // collectives.
  virtual void submit(StreamId stream, Tick tick, const Op& op, const Body& body,
                      CollectiveBarrier* barrier) = 0;
  // Memory that bodies on `stream` find in Exec::workspace from here on.
  virtual void set_workspace(StreamId, void* /*data*/, std::size_t /*bytes*/) {}
  // Completes an event that the device has stamped (CUDA records here; the CPU needs nothing).
  virtual void record(Event&) {}
  // Later work on `stream` starts after `event`.
  virtual void wait(StreamId stream, const Event& event) = 0;
  // The host sleeps until `event`. Throws: what a body threw, as long as the failure is not ended.
  virtual void block(const Event& event) = 0;
  // Forgets the failure, so that bodies run again.
  // Requires: the host has blocked on everything submitted.
  virtual Lost recover() { return {}; }
  // What the host had not seen the end of before its last `block` has failed with `error`, as that
  // of a peer does, which the device itself does not notice. Of `cuda` only.
  virtual void fail_unseen(const std::exception_ptr& /*error*/) {}

  // For `cuda` only; see DeviceContext::begin_capture. captures: whether operations can be kept
  // instead of run. begin_capture: from here on they are. end_capture: no longer; returns the graph
  // that they make, or drops them. replay: launches a graph on `compute`, and leaves the streams at
  // `end`.
  virtual bool captures() const { return false; }
  virtual void begin_capture() {}
  virtual std::shared_ptr<void> end_capture(bool /*drops*/) { return nullptr; }
  virtual void replay(void* /*graph*/, const Clock& /*end*/) {}

  // For `cuda` only: turns the timing of operations on or off. While it is on, `started` and
  // `finished` are told once the host has blocked on the operation, with the device's own times.
  // Other executors always tell them as bodies run.
  virtual void time_operations(bool /*times*/) {}

  // Seconds that `stream` has spent waiting for events of other streams since the start. Negative
  // if the executor cannot tell.
  virtual double waited_seconds(StreamId) const { return -1; }

  // The time at which `stream` has arrived, and the host's. It is in real seconds since a moment
  // that all ranks of the process share; on `virtual` in seconds of the cost model. In
  // Observer::started and finished it is when the body began and ended.
  virtual double seconds(StreamId) const { return host_seconds(); }
  virtual double host_seconds() const;
};

// Decides which of the ranks of `run_local` goes on, for executors that decide it together. It sees
// by itself when no rank can go on, so a world with one knows no timeout.
class HostScheduler {
 public:
  virtual ~HostScheduler() = default;
  // A rank's host thread calls attach first and detach last. `attach` returns once the rank may go
  // on. If a rank's thread could not be made, the caller of run_local calls `detach` alone.
  virtual void attach(int rank) = 0;
  virtual void detach(int rank) = 0;
};

struct ExecutorOptions;
// Makes the executor of a device. `observers` outlives it.
using ExecutorMaker =
    std::function<std::unique_ptr<Executor>(const ExecutorOptions&, const Observers&)>;
// Makes the scheduler that the executors of one `run_local` share.
using HostSchedulerMaker = std::function<std::shared_ptr<HostScheduler>(int ranks)>;

// One of the library's executors, or one of your own:
//
//   Device::cpu({.executor = ExecutorKind::inlined});
//   const auto make = [](const ExecutorOptions& options, const Observers& observers) {
//     return std::make_unique<Mine>(options, observers);
//   };
//   Device::cpu({.executor = {"mine", make}});
struct ExecutorChoice {
  ExecutorChoice(ExecutorKind of = ExecutorKind::threaded) : kind(of) {}
  ExecutorChoice(std::string_view own, ExecutorMaker maker, HostSchedulerMaker scheduler = {})
      : own_name(own), make(std::move(maker)), make_scheduler(std::move(scheduler)) {}

  // Whether it is the library's executor of that kind.
  bool operator==(ExecutorKind of) const { return !make && kind == of; }

  ExecutorKind kind = ExecutorKind::threaded;  // if `make` is empty
  std::string_view own_name{};                 // lasting text, for messages
  ExecutorMaker make{};
  HostSchedulerMaker make_scheduler{};  // for `run_local`; empty: ranks run by themselves
};
// `own_name`, or the name of `kind`.
std::string_view name(const ExecutorChoice& choice);

struct ExecutorOptions {
  ExecutorChoice executor{};
  int rank = 0;
  int threads = 1;                             // per rank, for kernels that split their work
  std::shared_ptr<HostScheduler> scheduler{};  // of the world; null if its executor has none
  CostModel cost{};                            // of `virtual`
  bool run_bodies = false;                     // on `virtual`; the others always do
  const Driver* driver = nullptr;              // of `cuda`
  int device_index = 0;                        // of `cuda`
};

// Makes the chosen executor. Throws: ContractError for options that do not fit each other.
std::unique_ptr<Executor> make_executor(const ExecutorOptions& options, const Observers& observers);

}  // namespace tessera
