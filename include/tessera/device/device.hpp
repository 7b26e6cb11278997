// Devices and streams: the one door through which all device work goes. device_context.hpp has what
// stands behind it, for the layers that own memory or watch.
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

  // Submits `body` behind everything submitted to this stream before, and notes a use of every
  // accessed allocation. A failure inside a body surfaces at the next call that blocks the host.
  template <class F>
  void launch(const Op& op, const F& body) const {
    submit(op, Body(body), nullptr);
  }
  // The same for one rank's part of a collective; see detail/device/collective_barrier.hpp.
  // `barrier` may be null: no peer is in this process.
  template <class F>
  void launch_collective(const Op& op, CollectiveBarrier* barrier, const F& body) const {
    submit(op, Body(body), barrier);
  }

  // An event: the point that this stream has reached, with all that it knows.
  Event record() const;
  // Later work on this stream starts after `event`. If it is ordered so already, this costs
  // nothing.
  // Throws: ContractError for an event that this device has not reached, for example another
  // device's.
  void wait(const Event& event) const;

  // The clock of everything that this stream is ordered after.
  const Clock& clock() const;

 private:
  void submit(const Op& op, const Body& body, CollectiveBarrier* barrier) const;

  DeviceContext* context_;
  StreamId id_;
};

// Where tensors live and work runs. A copyable handle. The last one gone ends the device, after its
// work is done.
//
//   Device gpu = world.device(), host = gpu.host();
//   Tensor moments = Tensor::zeros({n}, f32, host);   // memory of the host, a pool of its own
//   raw::copy_into(moments, on_gpu);                  // by `transfer`, in the order of the program
class Device {
 public:
  // A device without memory and work, for shapes only.
  static Device meta() { return Device(); }
  // This rank's CPU. Throws: DeviceError if the processor lacks what the kernels were built for;
  // ContractError for options out of range.
  static Device cpu(const CpuOptions& options = {});
  // A GPU, through the driver module, which the first call loads. Throws: DeviceError, in one line
  // with the remedy, if the module, one of its libraries or the device is missing, too old or of
  // another architecture. Work on the CPU goes on all the same.
  static Device cuda(const CudaOptions& options = {});

  // The host's side of this rank, whatever its device is. It has memory that copies to and from the
  // device can reach (pinned on CUDA), with a pool and a ledger of its own. The CPU's kernels run
  // there, on the stream `offload`. Streams, clocks and events are the rank's, so work of host and
  // device is ordered as work of two streams is. A CPU has both sides, too, as two memories.
  // Throws: ContractError on meta.
  Device host() const;
  bool is_host() const noexcept { return compute_ == StreamId::offload; }
  // The device itself, of which this may be the host's side.
  Device main() const { return on(StreamId::compute); }
  // The device with another stream for work that is asked for on it. Tensors of the two do not mix.
  Device on(StreamId stream) const {
    Device same = *this;
    same.compute_ = stream;
    return same;
  }
  // Whether both belong to one rank, so that events of one order work of the other.
  bool is_beside(const Device& other) const noexcept { return context_ == other.context_; }

  DeviceKind kind() const noexcept;  // cpu for a host's side
  bool is_meta() const noexcept { return context_ == nullptr; }
  int rank() const noexcept;
  // Whether bodies run. On `virtual` they do only if asked for; otherwise memory is counted and
  // never touched.
  bool runs_bodies() const noexcept;

  // Throws: ContractError on meta, as do all calls below.
  Stream stream(StreamId id) const;
  // The stream of work that is asked for on this device; on the host's side it is `offload`.
  Stream compute() const { return stream(compute_); }
  StreamId compute_id() const noexcept { return compute_; }
  Stream gather() const { return stream(StreamId::gather); }
  Stream reduce() const { return stream(StreamId::reduce); }

  // The clock of everything that the host is ordered after.
  const Clock& clock() const;

  // The host sleeps until `event`. From then on it knows what the event knew. Throws: what a body
  // threw.
  void block(const Event& event) const;
  // The host sleeps until everything submitted to any stream of this device is done. Throws:
  // likewise.
  void synchronize() const;
  // How many failures were ended so far; 0 on meta. A program may keep results of queued work, such
  // as a table. It makes them anew when this number has changed.
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
