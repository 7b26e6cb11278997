// What stands behind a Device: the clocks of its streams and of the host, the executor, observers,
// and what must outlive queued work. It is for the layers that own memory, the sharding engine, and
// instruments. A program needs device.hpp only.
//
//   Stream::launch ──▶ submit ──▶ tick, stamp accesses, observers ──▶ Executor
//   Stream::wait   ──▶ wait   ──▶ covered by the clock? nothing to do. Else Executor, then merge
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/device/device.hpp"

namespace tessera {

class Mutator;
class CapturedGraph;
struct CapturedWork;

// One rank's device: the clocks of its streams and of the host, its executor and its observers. It
// lives as long as its `Device` handles.
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
  // The driver through which `cuda` works; null on the CPU, and in a plan.
  const Driver* driver() const noexcept { return driver_; }
  // The same driver, for calls outside of bodies. It makes this device the calling thread's from
  // here on. Requires: driver() is not null.
  const Driver& acting_driver() const noexcept;
  CudaMemory cuda_memory() const noexcept { return cuda_memory_; }
  bool tf32() const noexcept { return tf32_; }
  bool deterministic() const noexcept { return deterministic_; }

  void submit(StreamId stream, const Op& op, const Body& body, CollectiveBarrier* barrier);
  // Holds an operation of the compute stream back, and keeps the storages behind its accesses
  // alive. Requires: holds(), which HoldGuard sets.
  void hold(const Op& op, const Body& body, std::span<const std::shared_ptr<const void>> storages);
  bool holds() const noexcept { return holds_; }
  // Submits what is held, in order.
  void submit_held() {
    if (!held_.empty()) submit_all_held();
  }
  // Drops what is held. The memory that this frees may be poisoned, by a launch like any other.
  void drop_held() noexcept { std::exchange(held_, {}).clear(); }
  Event record(StreamId stream);
  void wait(StreamId stream, const Event& event);
  void block(const Event& event);
  // The host sleeps until the operations of these ticks are done. Throws: as `block`, and as
  // `event_covering`.
  void block_on(const Clock& ticks);
  void synchronize();

  // Ends a failure. The host sleeps until everything submitted has run or was skipped. Then the
  // exception is dropped, and bodies run again. Requires: the barriers of queued collectives are
  // aborted, or all peers will come to them.
  void recover();
  // What the last ended failure kept from running; and how many failures `recover` has ended.
  const Lost& lost() const { return lost_; }
  std::uint64_t recoveries() const { return recoveries_; }

  // Marks everything submitted so far as work that must be done, for example an update of
  // parameters. A later failure lets it run, unless some rank failed before it.
  void commit() {
    committed_ = submitted();
    if (on_commit_) on_commit_();
  }
  void set_on_commit(std::function<void()> f) { on_commit_ = std::move(f); }
  // Called behind each blocking call, which throws what it throws.
  void set_on_block(std::function<void()> f) { on_block_ = std::move(f); }
  // Called behind each launch of captured work, with an event before and one behind it.
  using OnReplay = std::function<void(const Event& before, const Event& behind)>;
  void set_on_replay(OnReplay f) { on_replay_ = std::move(f); }
  // Whether the last ended failure kept committed work from running.
  bool has_lost_committed() const;

  const Clock& clock(StreamId stream) const { return clocks_[index(stream)]; }
  const Clock& host_clock() const { return host_; }
  // The ticks of everything submitted so far.
  Clock submitted() const;

  // An event of `stream` at or after `tick`: the last one recorded, if it is late enough, otherwise
  // a new one. Throws: ContractError for a tick that the stream has not reached.
  const Event& event_covering(StreamId stream, Tick tick);
  // The same for the gate of memory that is being freed. That can't fail; see `fail_late`.
  Event event_of_free(StreamId stream, Tick tick) noexcept;
  // Keeps the exception that is being handled for the next blocking call, where it can't be thrown
  // now.
  void fail_late() noexcept;

  // Work submitted from begin_capture to end_capture is kept instead of run. It is submitted again
  // as one: a graph of the device, see detail/device/captured_work.hpp. The host may not block
  // meanwhile. `drop_capture` keeps nothing: the work counts as lost, as by a failure. Requires:
  // executor().captures(). Throws: ContractError for work that a graph can't hold.
  void begin_capture();
  CapturedWork end_capture();
  void drop_capture() noexcept;
  bool is_capturing() const noexcept { return capture_ != nullptr; }
  // Runs such work behind everything submitted so far, and before all that comes. Clocks have
  // counted its first run already.
  void replay(const CapturedWork& work, bool is_first);
  // Drops the graphs of all such work, also of that which is being captured: who replays it, or
  // ends its capture, gets a CommError with `why`. Any thread may call.
  void drop_graphs(const std::string& why);
  // Blocks until replays are done. Memory goes back to the system only then, because last uses know
  // nothing of replays.
  void block_on_replays();

  // Seconds for which the host has slept in `block` since the start.
  double blocked_seconds() const { return blocked_seconds_; }
  // Operations submitted so far, over all streams.
  std::uint64_t launches() const { return launches_; }

  // Adds an observer that is not owned. It outlives the device or is removed. Call it while the
  // device is idle.
  void add_observer(Observer& observer) { observers_.push_back(&observer); }
  // Adds one that stays until the device ends.
  void add_observer(std::shared_ptr<Observer> observer);
  void remove_observer(Observer& observer);
  // Tells observers of memory. It is for the layers that own memory, and for the host's own reads
  // and writes. It can't fail, because memory goes back in destructors; see `fail_late`. It costs a
  // comparison if nobody watches.
  void tell(const MemoryEvent& event) noexcept {
    for (Observer* o : observers_) try {
        o->memory(event);
      } catch (...) {
        fail_late();
      }
  }
  bool is_observed() const noexcept { return !observers_.empty(); }
  // Tells that the host itself reads, or writes, bytes that operations touch, too.
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
  // Keeps `what` until the host knows that everything submitted so far has run. Queued operations
  // may use it after its maker is gone, for example by an exception. Never blocks; `block` and
  // `keep` let go of what is done.
  void keep(std::shared_ptr<void> what);
  // Lets go of everything kept. Requires: everything submitted has run, or was skipped.
  void drop_kept() noexcept { std::exchange(kept_, {}).clear(); }
  // `text` as an operation's name. The same text has the same address, as long as the device lives.
  const char* intern(std::string_view text) { return names_.emplace(text).first->c_str(); }

  // The memory layer's state for this device, from first use on. It ends with the device.
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
  std::unique_ptr<Mutator> mutator_;        // null except in tests
  bool failure_told_ = false;               // a blocking call has thrown it
  std::shared_ptr<CapturedGraph> capture_;  // that is under way, else null
  std::mutex graphs_mutex_;
  std::vector<std::weak_ptr<CapturedGraph>> graphs_;  // all that may be there
  Event replayed_;                                    // the end of the last replay
  std::exception_ptr late_;  // of fail_late; thrown by every blocking call until `recover`
  Lost lost_;
  Clock committed_;
  std::function<void()> on_commit_, on_block_;
  OnReplay on_replay_;
  std::uint64_t recoveries_ = 0;
  std::vector<Kept> kept_;
  bool holds_ = false;
  std::vector<Held> held_;
  std::set<std::string> names_;         // nodes, whose addresses stay
  std::unique_ptr<Executor> executor_;  // last: its workers end first
};

}  // namespace tessera
