// Devices and streams: the one door through which all device work goes, and the clocks behind it.
//
//   Device device = Device::cpu();
//   device.compute().launch({.name = "fill", .accesses = accesses},
//                           [p, n](Exec&) { std::fill_n(p, n, 1.f); });
//   device.gather().wait(device.compute().record());   // an edge: gather's later work follows
//   device.block(device.gather().record());            // the host sleeps until then
//
// Threads: one host thread submits to a device. Executors run bodies on threads of their own.
#pragma once

#include <exception>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/device/event.hpp"
#include "tessera/device/executor.hpp"
#include "tessera/device/mutation.hpp"
#include "tessera/device/observer.hpp"
#include "tessera/device/op.hpp"

namespace tessera {

enum class DeviceKind : std::uint8_t { meta, cpu, cuda };

class DeviceContext;

// A stream of a device. A small value that owns nothing.
class Stream {
 public:
  Stream(DeviceContext& context, StreamId id) : context_(&context), id_(id) {}

  StreamId id() const noexcept { return id_; }

  // Submits `body` behind everything submitted to this stream before. Touches every accessed
  // allocation. A failure inside a body surfaces at the next call that blocks the host.
  template <class F>
  void launch(const Op& op, const F& body) const {
    submit(op, Body(body), nullptr);
  }
  // The same for one rank's part of a collective; see device/collective_barrier.hpp. `barrier` may
  // be null (no peer in this process).
  template <class F>
  void launch_collective(const Op& op, CollectiveBarrier* barrier, const F& body) const {
    submit(op, Body(body), barrier);
  }

  // The point reached so far, with all that this stream knows.
  Event record() const;
  // Later work on this stream starts after `event`. Free when that is already so.
  // Throws: ContractError for an event that this device has not reached, as one of another device.
  void wait(const Event& event) const;

  // What this stream is ordered after.
  const Clock& clock() const;

 private:
  void submit(const Op& op, const Body& body, CollectiveBarrier* barrier) const;

  DeviceContext* context_;
  StreamId id_;
};

struct CpuOptions {
  ExecutorKind executor = ExecutorKind::threaded;
  int rank = 0;
  int threads = 1;  // per rank, for kernels that split their work
  std::uint64_t schedule_seed = 0;
  std::shared_ptr<ShuffledScheduler> scheduler{};  // shared by the ranks of a `shuffled` world
  CostModel cost{};                                // of `virtual`: how long operations take
  bool run_bodies = false;                         // on `virtual`, which else only counts
};

// Where a GPU's memory comes from.
enum class CudaMemory : std::uint8_t {
  pieces,  // allocations of the driver; they can't grow
  mapped,  // addresses set aside once, memory mapped behind them as they grow
};

struct CudaOptions {
  int index = 0;  // of the device in this machine; several ranks may share one
  int rank = 0;
  // Or `virtual_`: a plan, for which neither module nor device is needed.
  ExecutorKind executor = ExecutorKind::cuda;
  CostModel cost{};  // of `virtual`
  CudaMemory memory = CudaMemory::pieces;
  // f32 products may round their operands to 11 significant bits: TF32, on tensor cores.
  bool tf32 = false;
  // For tests of schedules: some operations start late, on a device that is kept busy without
  // touching memory, as the seed has it. 0: none.
  std::uint64_t delay_seed = 0;
  // The driver module's file. Empty: libtessera-cuda.so near this library, or where the system
  // looks.
  std::string module{};
};

// Where tensors live and work runs. A copyable handle; the last one gone ends the device, after its
// work is done.
class Device {
 public:
  // No memory and no work: shapes only.
  static Device meta() { return Device(); }
  // This rank's CPU.  Throws: DeviceError when the processor lacks what the kernels were built for;
  // ContractError for options out of range.
  static Device cpu(const CpuOptions& options = {});
  // A GPU, through the driver module, which the first call loads. Throws: DeviceError, in one line
  // with the remedy, where the module, one of its libraries or the device is missing, too old or of
  // another architecture. What runs on the CPU is not touched by that.
  static Device cuda(const CudaOptions& options = {});

  DeviceKind kind() const noexcept;
  bool is_meta() const noexcept { return context_ == nullptr; }
  int rank() const noexcept;
  // False on `virtual` unless asked for: memory is counted, never touched, and no body runs.
  bool runs_bodies() const noexcept;

  // Throws: ContractError on meta, as do all calls below.
  Stream stream(StreamId id) const;
  Stream compute() const { return stream(StreamId::compute); }
  Stream gather() const { return stream(StreamId::gather); }
  Stream reduce() const { return stream(StreamId::reduce); }

  // The host sleeps until `event` and from then on knows what it knew.  Throws: what a body threw.
  void block(const Event& event) const;
  // ... until everything submitted to any stream of this device is done.
  void synchronize() const;
  // Failures that were ended so far. Who keeps what a queued operation makes, a table say, makes it
  // anew when the number has changed. 0 on meta.
  std::uint64_t recoveries() const noexcept;

  // Everything else about the device, for the layers below the engine.
  DeviceContext& context() const;

  bool operator==(const Device& other) const noexcept { return context_ == other.context_; }

 private:
  Device() = default;
  explicit Device(std::shared_ptr<DeviceContext> context) : context_(std::move(context)) {}

  std::shared_ptr<DeviceContext> context_;
};

// What a higher layer hangs on a device: its memory. Destroyed with it.
struct DeviceExtension {
  virtual ~DeviceExtension() = default;
};

// One rank's device: streams' clocks, the host's clock, executor and observers. Owned by its
// `Device` handles.
class DeviceContext {
 public:
  DeviceContext(DeviceKind kind, int rank, const ExecutorOptions& options,
                CudaMemory cuda_memory = CudaMemory::pieces, bool tf32 = false);
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

  void submit(StreamId stream, const Op& op, const Body& body, CollectiveBarrier* barrier);
  Event record(StreamId stream);
  void wait(StreamId stream, const Event& event);
  void block(const Event& event);
  void synchronize();

  // Ends a failure: sleeps until everything submitted has run or was skipped, drops the exception,
  // and lets bodies run again.  Requires: the barriers of what is queued are aborted, or all peers
  // will come to them.
  void recover();
  // What the failure that `recover` ended last kept from running, and how many it has ended.
  const Lost& lost() const { return lost_; }
  std::uint64_t recoveries() const { return recoveries_; }

  const Clock& clock(StreamId stream) const { return clocks_[index(stream)]; }
  const Clock& host_clock() const { return host_; }

  // An event of `stream` at or after `tick`: the last one recorded if it is late enough, else a new
  // one.  Throws: ContractError for a tick that the stream has not reached.
  const Event& event_covering(StreamId stream, Tick tick);
  // The same for the gate of memory that is being freed, which can't fail: see `fail_late`.
  Event event_of_free(StreamId stream, Tick tick) noexcept;
  // Keeps the exception that is being handled, where none can be thrown, for the next blocking
  // call.
  void fail_late() noexcept;

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
  // For tests: removes one edge from here on, and says how many of its kind have come since.
  void mutate(const Mutation& mutation) { mutator_ = std::make_unique<Mutator>(mutation); }
  std::uint64_t edges_seen() const noexcept { return mutator_ ? mutator_->seen() : 0; }

  // Keeps `what` until the host knows that everything submitted so far has run: for what queued
  // operations still use when its owner goes, by an exception say. Never blocks.
  void keep(std::shared_ptr<void> what);
  // Lets go of all that is kept. Requires: everything submitted has run, or was skipped.
  void drop_kept() noexcept { kept_.clear(); }
  // `text` as an operation's name: the same text at the same address, as long as the device lives.
  const char* intern(std::string_view text) { return names_.emplace(text).first->c_str(); }

  std::unique_ptr<DeviceExtension> memory;  // set by the memory layer at first use

 private:
  struct Kept {
    Clock until;
    std::shared_ptr<void> what;
  };
  Event mark(StreamId stream, bool by_program);
  void rethrow_late() const;
  void expect_reached(const Event& event, const char* function) const;
  bool is_mutated(Mutation::Kind kind) { return mutator_ && mutator_->hits(kind); }

  DeviceKind kind_;
  int rank_;
  const Driver* driver_;
  int device_index_;
  CudaMemory cuda_memory_;
  bool tf32_;
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
  std::exception_ptr late_;           // of fail_late; thrown by every blocking call until `recover`
  Lost lost_;
  std::uint64_t recoveries_ = 0;
  std::vector<Kept> kept_;
  std::set<std::string> names_;         // nodes, whose addresses stay
  std::unique_ptr<Executor> executor_;  // last: its workers end first
};

}  // namespace tessera
