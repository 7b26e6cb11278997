// Devices and streams: the one door through which all device work goes. What stands behind it, for
// the layers that own memory or watch, is device_context.hpp.
//
//   Device device = Device::cpu();
//   device.compute().launch({.name = "fill", .accesses = accesses},
//                           [p, n](Exec&) { std::fill_n(p, n, 1.f); });
//   device.gather().wait(device.compute().record());   // an edge: gather's later work follows
//   device.block(device.gather().record());            // the host sleeps until then
//
// Threads: one host thread submits to a device. Executors run bodies on threads of their own.
#pragma once

#include <memory>
#include <utility>

#include "tessera/device/event.hpp"
#include "tessera/device/executor.hpp"
#include "tessera/device/op.hpp"
#include "tessera/device/options.hpp"

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
  // The same for one rank's part of a collective; see detail/device/collective_barrier.hpp.
  // `barrier` may be null (no peer in this process).
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

// Where tensors live and work runs. A copyable handle; the last one gone ends the device, after its
// work is done.
//
//   Device gpu = world.device(), host = gpu.host();
//   Tensor moments = Tensor::zeros({n}, f32, host);   // memory of the host, a pool of its own
//   raw::copy_into(moments, on_gpu);                  // by `transfer`, in the order of the program
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

  // What this rank has on the host, whatever its device is: memory that copies to and from the
  // device reach (pinned on CUDA), with a pool and a ledger of its own, and the CPU's kernels on
  // the stream `offload`. Streams, clocks and events are the rank's, so that its work and the
  // device's follow one another like that of two streams. A CPU has both, too, as two memories.
  // Throws: ContractError on meta.
  Device host() const;
  bool is_host() const noexcept { return compute_ == StreamId::offload; }
  // The device itself, of which this is the host's side or not.
  Device main() const { return on(StreamId::compute); }
  // The device with another stream for what is asked for on it: tensors of the two do not mix.
  Device on(StreamId stream) const {
    Device same = *this;
    same.compute_ = stream;
    return same;
  }
  // Whether both are of one rank, so that events of one order work of the other.
  bool is_beside(const Device& other) const noexcept { return context_ == other.context_; }

  DeviceKind kind() const noexcept;  // of a host's side cpu
  bool is_meta() const noexcept { return context_ == nullptr; }
  int rank() const noexcept;
  // False on `virtual` unless asked for: memory is counted, never touched, and no body runs.
  bool runs_bodies() const noexcept;

  // Throws: ContractError on meta, as do all calls below.
  Stream stream(StreamId id) const;
  // Of what is asked for on this device: on the host's side it is the stream `offload`.
  Stream compute() const { return stream(compute_); }
  StreamId compute_id() const noexcept { return compute_; }
  Stream gather() const { return stream(StreamId::gather); }
  Stream reduce() const { return stream(StreamId::reduce); }

  // What the host is ordered after.
  const Clock& clock() const;

  // The host sleeps until `event` and from then on knows what it knew.  Throws: what a body threw.
  void block(const Event& event) const;
  // ... until everything submitted to any stream of this device is done.
  void synchronize() const;
  // Failures that were ended so far, 0 on meta. Results of queued work that a program keeps, such
  // as a table, are to be made anew when this number has changed.
  std::uint64_t recoveries() const noexcept;

  // Everything else about the device: see device_context.hpp.
  DeviceContext& context() const;

  bool operator==(const Device& other) const noexcept {
    return context_ == other.context_ && compute_ == other.compute_;
  }

 private:
  Device() = default;
  explicit Device(std::shared_ptr<DeviceContext> context) : context_(std::move(context)) {}

  std::shared_ptr<DeviceContext> context_;
  StreamId compute_ = StreamId::compute;
};

}  // namespace tessera
