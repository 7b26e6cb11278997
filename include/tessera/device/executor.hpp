// What submitting means. An executor is told of launches, records and waits in the order of the
// host program and decides when bodies run. Nothing above the device layer knows which one is at
// work.
//
//   threaded   a queue and a worker thread per stream: real overlap on the CPU
//   inline     at once, on the host thread
//   shuffled   all ranks' streams under one baton, the next operation chosen by a seed
//   virtual    at once on a clock of its own, by a cost model; bodies run only on request: planning
//   cuda       on streams of a device, behind the driver of a module
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "tessera/device/collective_barrier.hpp"
#include "tessera/device/cost_model.hpp"
#include "tessera/device/event.hpp"
#include "tessera/device/observer.hpp"
#include "tessera/device/op.hpp"

namespace tessera {

enum class ExecutorKind : std::uint8_t { threaded, inlined, shuffled, virtual_, cuda };

// "threaded", "inline", "shuffled", "virtual", "cuda".
std::string_view name(ExecutorKind kind);

// What a failure kept from running: on each stream everything from its first on, 0 for nothing.
struct Lost {
  Clock first;   // failed or skipped
  Clock failed;  // in its body, which may have begun to write
};

class Executor {
 public:
  virtual ~Executor() = default;

  virtual ExecutorKind kind() const = 0;
  // False for planning: memory is counted and never touched.
  virtual bool runs_bodies() const { return true; }

  // Runs `body` on `stream` after everything submitted to it before; `barrier` is set for
  // collectives.
  virtual void submit(StreamId stream, Tick tick, const Op& op, const Body& body,
                      CollectiveBarrier* barrier) = 0;
  // Memory that bodies on `stream` find in Exec::workspace from here on.
  virtual void set_workspace(StreamId, void* /*data*/, std::size_t /*bytes*/) {}
  // Completes an event that the device has stamped (CUDA records here; the CPU needs nothing).
  virtual void record(Event&) {}
  // Later work on `stream` starts after `event`.
  virtual void wait(StreamId stream, const Event& event) = 0;
  // The host sleeps until `event`.  Throws: what a body threw, once one did.
  virtual void block(const Event& event) = 0;
  // Forgets the failure, so that bodies run again.
  // Requires: the host has blocked on everything submitted.
  virtual Lost recover() { return {}; }

  // On a device whose work outruns its host: from here on observers hear of an operation's start
  // and end when the host has blocked on it, with the times at which the device came there; or no
  // longer. Elsewhere they always do.
  virtual void time_operations(bool /*times*/) {}

  // Seconds that `stream` has spent waiting for events of other streams since the start; negative
  // where it cannot tell.
  virtual double waited_seconds(StreamId) const { return -1; }

  // The time at which `stream` has arrived, and the host's: real seconds since a moment that all
  // ranks of the process share, on `virtual` those of the cost model. In Observer::started and
  // finished it is when the body began and ended.
  virtual double seconds(StreamId) const { return host_seconds(); }
  virtual double host_seconds() const;
};

// The scheduler that all ranks of a `shuffled` world share: exactly one host thread or operation
// runs at a time, and the seed chooses the next at every point where a host thread blocks. Same
// program and seed, same trace.
class ShuffledScheduler {
 public:
  static std::shared_ptr<ShuffledScheduler> make(std::uint64_t seed, int ranks);
  virtual ~ShuffledScheduler() = default;

  // A rank's host thread brackets its life with these; `attach` sleeps until the seed chooses it.
  virtual void attach(int rank) = 0;
  virtual void detach(int rank) = 0;

  // FNV-1a over (rank, stream, name) of all operations in the order in which they ran.
  virtual std::uint64_t trace_hash() const = 0;
};

struct ExecutorOptions {
  ExecutorKind kind = ExecutorKind::threaded;
  int rank = 0;
  int threads = 1;                                 // per rank, for kernels that split their work
  std::shared_ptr<ShuffledScheduler> scheduler{};  // for `shuffled`; made from `seed` when absent
  std::uint64_t seed = 0;                          // of the scheduler made here
  CostModel cost{};                                // of `virtual`
  bool run_bodies = false;                         // on `virtual`; the others always do
  const Driver* driver = nullptr;                  // of `cuda`
  int device_index = 0;                            // of `cuda`
  std::uint64_t delay_seed = 0;                    // of `cuda`; see CudaOptions
};

// `observers` outlives the executor and is told of every body that starts and ends.
std::unique_ptr<Executor> make_executor(const ExecutorOptions& options, const Observers& observers);

}  // namespace tessera
