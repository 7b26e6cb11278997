// The unreduced gradients of a unit on several ranks. Backward writes them into a slot, scaled by
// 1/N; one grouped reduce-scatter then sums them over the ranks into the flat gradient of this
// rank's shards. One rank has none: its gradients go straight into the flat group (LocalGradient).
//
//   empty ──take──▶ taken ──sink──▶ filling ──reduce──▶ empty
//                                             │ zeros for what did not arrive, a count of 0 or 1
//                                             │ for each parameter, reduce-scatter queued, slot
//                                             │ given back
//
//   compute   dW │ dW │ complete ┐ record
//   reduce                       └ wait │ reduce_scatter │ (accumulate) │ record ┐
//   who reads the gradient                       FlatGroup::await_gradient: wait ┘
//
// PyTorch FSDP2 keeps a gradient a parameter and copies them into reduce_scatter_input first.
#pragma once

#include <memory>

#include "runtime/shard/unit_shards.hpp"
#include "tessera/param/gradient_sinks.hpp"

namespace tessera::shard {

class GradientBuffer {
 public:
  // `shards` outlives this, has memory and something to train.
  explicit GradientBuffer(const UnitShards& shards);
  ~GradientBuffer() { drop(); }

  // Takes a slot, where every rank does: as its unit is entered. What a rank's graph then reaches
  // is its own affair.
  void take();
  // The sink of one more contribution to the gradient of the trainable group's entry.
  autograd::GradientSink sink(int entry);
  // Reduces what has arrived, zeros for what has not, and gives the slot back. Adds to a gradient
  // that is there. FlatGroup::reduced is recorded after it.
  void reduce();
  // For a pass that failed: what has arrived is lost.
  void drop() noexcept;

 private:
  void begin_use();
  void complete();
  double missing_part(std::size_t word) const;
  Tensor fresh_gradient() const;
  Tensor staging() const;
  void scatter(const Tensor& values, const Tensor& counts);
  void accumulate(const Tensor& to, const Tensor& staged, bool is_fresh) const;
  void clear_gaps(Stream stream, const Tensor& flat, const Tensor& table) const;

  // Of the flat gradient: what this buffer is reduced into, in elements.
  struct Range {
    std::int64_t begin = 0, end = 0;  // of the values, with the gaps between them
    std::int64_t counts = 0;          // how many, where the arrival counts lie
    std::int64_t counts_begin = 0;
    std::int64_t numel() const { return end - begin; }
  };

  const UnitShards& shards_;
  PreparedGroups prepared_;
  Range range_;
  Tensor entries_, gaps_f32_, gaps_reduce_;  // tables of kernels::FlatSpan
  Slot slot_;
  std::shared_ptr<Storage> buffer_;  // null before the first sink
  std::weak_ptr<Storage> reduced_;   // the flat gradient that it was reduced into
  ArrivalMask arrived_;
};

}  // namespace tessera::shard
