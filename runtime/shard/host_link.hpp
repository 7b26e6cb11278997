// What goes between the device and shards that lie on the host: see ShardOptions::offload. A unit's
// part is one copy; with gather transforms one of what they encode, and one of each stretch of
// other parameters. They go through memory of fixed size that all units under a root share; two
// parts of it take turns, so that the next copy comes in while one is read.
//
//   offload    wait updated │ cast ┐                    a gather
//   transfer                       └ copy_to_device ┐
//   gather                                          └ pack_shard │ all_gather
//
//   of parameters with a gather transform `encode` stands in the place of `cast`
//
//   reduce     reduce_scatter ┐                         a reduction
//   transfer                  └ copy_to_host ┐
//   offload                                  └ accumulate_shard, where a gradient is there already
//                                              or the wire has another dtype
//
// PyTorch FSDP2: CPUOffloadPolicy, which copies parameter by parameter and casts on the device.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "tessera/tensor/tensor.hpp"

namespace tessera::shard {

class UnitShards;

class HostLink {
 public:
  // The most bytes that one copy of a unit's shards has, and those of them that the host has to
  // cast or encode; and that a reduction leaves, values and arrival counts.
  struct Sizes {
    std::int64_t gathered = 0, cast = 0, reduced = 0;
    // Those of one more unit, whose reductions leave `reduced_bytes` at most.
    void add(const UnitShards& shards, std::int64_t reduced_bytes);
  };
  HostLink(const Device& device, const Sizes& sizes);
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;

  // `shards`, on the host and last written before `updated`, in `dtype` on the device: for work
  // on the gather stream from here to `end_gather`, which stands before the next call.
  Tensor begin_gather(const Tensor& shards, DType dtype, const Event& updated);
  void end_gather();
  // The same for what a unit's gather transforms encode: bytes of the host that its stream may
  // write, and, when it has, these bytes on the device.
  Tensor begin_encode(std::int64_t bytes);
  Tensor begin_gather(const Tensor& encoded);

  // `numel` elements on the device that `stream` may write: the sums of a reduction.
  Tensor take_sums(Stream stream, std::int64_t numel, DType dtype);
  // Adds what `stream` has made of them, values and then counts, to these tensors of the host, or
  // makes these that where `is_fresh`. What is returned has come then. Before the next take_sums.
  Event add_to(const Tensor& values, const Tensor& counts, const Tensor& sums, Stream stream,
               bool is_fresh);

  // Of all its parts.
  std::int64_t device_bytes() const noexcept { return 2 * (gathered_.bytes() + sums_.bytes()); }
  std::int64_t host_bytes() const noexcept { return 2 * (cast_.bytes() + landed_.bytes()); }

 private:
  // Two parts, one used while the other is free again after an event.
  class Halves {
   public:
    Halves(const Device& on, std::int64_t bytes);
    // The next one, which `stream` may write now.
    Tensor next(Stream stream, std::int64_t numel, DType dtype);
    // Of the last one: whoever has it next waits for this.
    void free_after(const Event& event) { parts_[half_].free = event; }
    std::int64_t bytes() const noexcept { return bytes_; }

   private:
    struct Part {
      std::shared_ptr<Storage> memory;
      Event free;
    };
    std::int64_t bytes_;
    std::array<Part, 2> parts_;
    std::size_t half_ = 0;
  };
  Tensor to_device(const Tensor& from, const Event& made);

  Device device_, host_;
  Halves cast_, gathered_, sums_, landed_;
};

}  // namespace tessera::shard
