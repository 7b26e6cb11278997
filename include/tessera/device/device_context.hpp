// What stands behind a Device: the clocks of its streams and of the host, the executor, those who
// watch, and what must outlive queued work. For the layers that own memory, the sharding engine,
// and instruments; a program needs device.hpp only.
//
//   Stream::launch ──▶ submit ──▶ tick, stamp accesses, observers ──▶ Executor
//   Stream::wait   ──▶ wait   ──▶ covered by the clock? nothing to do. Else Executor, then merge
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/device/device.hpp"

namespace tessera {

class Mutator;
struct CapturedWork;

// One rank's device: streams' clocks, the host's clock, executor and observers. Lives as long as
// its `Device` handles.
class DeviceContext {
 public:
  DeviceContext(DeviceKind kind, int rank, const ExecutorOptions& options,
                CudaMemory cuda_memory = CudaMemory::pieces, bool tf32 = false,
                bool deterministic = true);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  DeviceKind kind() const noexcept { return kind_; }
  int rank() const noexcept { return rank_; }
  Executor& executor() noexcept { return *executor_; }
  // What `cuda` does its work through; null on the CPU, and in a plan.
  const Driver* driver() const noexcept { return driver_; }
  // The same for calls beside a body's: the device is the calling thread's from here on.
  // Requires: driver() is not null.
  const Driver& acting_driver() const noexcept;
  CudaMemory cuda_memory() const noexcept { return cuda_memory_; }
  bool tf32() const noexcept { return tf32_; }
  bool deterministic() const noexcept { return deterministic_; }

  void submit(StreamId stream, const Op& op, const Body& body, CollectiveBarrier* barrier);
  // Keeps an operation of the compute stream back, and the storages behind its accesses alive.
  // Requires: holds(), which HoldGuard says.
  void hold(const Op& op, const Body& body, std::span<const std::shared_ptr<const void>> storages);
  bool holds() const noexcept { return holds_; }
  // Submits what is held, in its order.
  void submit_held() {
    if (!held_.empty()) submit_all_held();
  }
  // Memory that goes with it may be poisoned, which is launched like anything else.
  void drop_held() noexcept { std::exchange(held_, {}).clear(); }
  Event record(StreamId stream);
  void wait(StreamId stream, const Event& event);
  void block(const Event& event);
  // The host sleeps until these operations are done. Throws as `block`, and as `event_covering`.
  void block_on(const Clock& ticks);
  void synchronize();

  // Ends a failure: sleeps until everything submitted has run or was skipped, drops the exception,
  // and lets bodies run again.  Requires: the barriers of what is queued are aborted, or all peers
  // will come to them.
  void recover();
  // What the failure that `recover` ended last kept from running, and how many it has ended.
  const Lost& lost() const { return lost_; }
  std::uint64_t recoveries() const { return recoveries_; }

  // All that is submitted so far is for values that are to be there whatever comes, as updated
  // parameters are: a failure behind it lets it run, where no rank has failed before it.
  void commit() {
    committed_ = submitted();
    if (on_commit_) on_commit_();
  }
  void set_on_commit(std::function<void()> f) { on_commit_ = std::move(f); }
  // Called behind each blocking call, which throws what it throws.
  void set_on_block(std::function<void()> f) { on_block_ = std::move(f); }
  // Whether the failure that `recover` ended last kept something of it from running.
  bool has_lost_committed() const;

  const Clock& clock(StreamId stream) const { return clocks_[index(stream)]; }
  const Clock& host_clock() const { return host_; }
  // The ticks of all that has been submitted.
  Clock submitted() const;

  // An event of `stream` at or after `tick`: the last one recorded if it is late enough, else a new
  // one.  Throws: ContractError for a tick that the stream has not reached.
  const Event& event_covering(StreamId stream, Tick tick);
  // The same for the gate of memory that is being freed, which can't fail: see `fail_late`.
  Event event_of_free(StreamId stream, Tick tick) noexcept;
  // Keeps the exception that is being handled, where none can be thrown, for the next blocking
  // call.
  void fail_late() noexcept;

  // What is submitted from begin_capture to end_capture is kept instead of run, to be submitted
  // again as one: a graph of the device, see detail/device/captured_work.hpp. The host may not
  // block meanwhile. `drop_capture` keeps nothing: what was submitted counts as lost, as by a
  // failure. Requires: executor().captures().  Throws: ContractError from what a graph can't hold.
  void begin_capture();
  CapturedWork end_capture();
  void drop_capture() noexcept;
  bool is_capturing() const noexcept { return is_capturing_; }
  // Runs it behind everything submitted so far, and before all that comes. The first time the
  // clocks have counted it already.
  void replay(const CapturedWork& work, bool is_first);
  // For who gives memory back to the system: last uses know nothing of replays.
  void block_on_replays();

  // Seconds for which the host has slept in `block` since the start.
  double blocked_seconds() const { return blocked_seconds_; }
  // Operations submitted so far, over all streams.
  std::uint64_t launches() const { return launches_; }

  // Not owned; must outlive the device or be removed. Call while the device is idle.
  void add_observer(Observer& observer) { observers_.push_back(&observer); }
  // Stays until the device ends.
  void add_observer(std::shared_ptr<Observer> observer);
  void remove_observer(Observer& observer);
  // For the layers that own memory and for the host's own reads and writes. Can't fail, because
  // memory goes back in destructors: see `fail_late`. Costs a comparison where nobody watches.
  void tell(const MemoryEvent& event) noexcept {
    for (Observer* o : observers_) try {
        o->memory(event);
      } catch (...) {
        fail_late();
      }
  }
  bool is_observed() const noexcept { return !observers_.empty(); }
  // The host itself reads or writes bytes that operations touch, too.
  void host_reads(const void* data, std::size_t bytes) {
    tell({.kind = MemoryEvent::Kind::host_reads,
          .begin = data,
          .end = static_cast<const std::byte*>(data) + bytes});
  }
  void host_writes(const void* data, std::size_t bytes) {
    tell({.kind = MemoryEvent::Kind::host_writes,
          .begin = data,
          .end = static_cast<const std::byte*>(data) + bytes});
  }
  // Keeps `what` until the host knows that everything submitted so far has run: for what queued
  // operations still use when whoever made it goes, by an exception say. Never blocks; `block` and
  // `keep` let go of what is done.
  void keep(std::shared_ptr<void> what);
  // Lets go of all that is kept. Requires: everything submitted has run, or was skipped.
  void drop_kept() noexcept { std::exchange(kept_, {}).clear(); }
  // `text` as an operation's name: the same text at the same address, as long as the device lives.
  const char* intern(std::string_view text) { return names_.emplace(text).first->c_str(); }

  // What the memory layer keeps of this device, from first use on. It ends with the device.
  std::shared_ptr<void> memory;

 private:
  friend class Mutator;  // of tests, in runtime/device/testing.hpp
  struct Kept {
    Clock until;
    std::shared_ptr<void> what;
  };
  friend class HoldGuard;
  static constexpr std::size_t kMostHeld = 8, kMostAccesses = 12;
  struct Held {
    const char* name;
    Cost cost;
    std::array<Access, kMostAccesses> accesses;
    std::array<std::shared_ptr<const void>, kMostAccesses> storages;
    std::size_t count;
    Body body;
  };
  void submit_all_held();
  void submit_kept(const void* result);
  void drop_done();
  Event mark(StreamId stream, bool by_program);
  void rethrow_late() const;
  void expect_reached(const Event& event, const char* function) const;

  DeviceKind kind_;
  int rank_;
  const Driver* driver_;
  int device_index_;
  CudaMemory cuda_memory_;
  bool tf32_, deterministic_;
  Observers observers_;
  std::vector<std::shared_ptr<Observer>> owned_observers_;
  std::array<Clock, kMaxStreams> clocks_{};
  std::array<Event, kMaxStreams> last_events_{};
  Clock host_;
  double blocked_seconds_ = 0;
  std::uint64_t launches_ = 0;
  std::uint64_t records_ = 0;
  std::unique_ptr<Mutator> mutator_;  // null but in tests
  bool failure_told_ = false;         // a blocking call has thrown it
  bool is_capturing_ = false;
  Event replayed_;           // the end of the last replay
  std::exception_ptr late_;  // of fail_late; thrown by every blocking call until `recover`
  Lost lost_;
  Clock committed_;
  std::function<void()> on_commit_, on_block_;
  std::uint64_t recoveries_ = 0;
  std::vector<Kept> kept_;
  bool holds_ = false;
  std::vector<Held> held_;
  std::set<std::string> names_;         // nodes, whose addresses stay
  std::unique_ptr<Executor> executor_;  // last: its workers end first
};

}  // namespace tessera
