// The unreduced gradients of some of a unit's parameters. Backward writes them into a slot, divided
// by N; one grouped reduce-scatter then sums them over the ranks into their part of the flat
// gradient of this rank's shards. What comes while there is no slot is held in the pool: early in a
// pass, or all of it where the pass reduces nothing.
//
//   empty ──take──▶ taken ──sink──▶ filling ──reduce──▶ empty
//     │ sink: held          │ held: copied    │ zeros for what did not arrive, a count of 0 or 1
//     ▼                                       │ for each parameter, reduce-scatter queued, slot
//   empty                                     │ given back
//
//   compute   dW │ dW ┐ record
//   reduce            └ wait │ complete │ reduce_scatter │ (hook) │ (accumulate) │ record ┐
//   who reads the gradient                                FlatGroup::await_reduced: wait  ┘
//
// PyTorch FSDP2 keeps a gradient a parameter and copies them into reduce_scatter_input first.
#pragma once

#include <memory>

#include "runtime/param/gradient_sinks.hpp"
#include "runtime/shard/prepared_groups.hpp"
#include "runtime/shard/reduce_stage.hpp"
#include "runtime/shard/stages.hpp"
#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class Replicas;
class SymmetricGradients;

class GradientPiece {
 public:
  // Both outlive this; `shards` has memory.
  GradientPiece(const UnitShards& shards, const PieceLayout& layout);
  ~GradientPiece() { give_back(); }
  GradientPiece(const GradientPiece&) = delete;
  GradientPiece& operator=(const GradientPiece&) = delete;

  // Takes a slot, where every rank does.
  void take();
  bool is_taken() const noexcept { return slot_.arena != nullptr; }
  // The sink of one more contribution to the gradient of the unit's trainable parameter `at`, from
  // 0, which is one of these: in the slot if it is taken.
  autograd::GradientSink sink(std::size_t at);
  // Reduces what has arrived, zeros for what has not, and gives the slot back. Adds to a gradient
  // that is there. FlatGroup::reduced is recorded after it. Where the sum over the replicas is
  // postponed, this rank's terms of it are kept.
  void reduce();
  // Gives the slot back; what has arrived in it is lost.
  void give_back() noexcept;
  // Drops what is kept from pass to pass: all, or of the trainable parameter `at`.
  void drop_kept() noexcept;
  void drop_kept(std::size_t at);

  // Of its gradients without a slot.
  std::int64_t waiting_bytes() const noexcept;
  // Of what a reduce-scatter leaves on this rank: values and counts, in the dtype of the wire.
  std::int64_t shard_bytes() const noexcept { return shard_numel() * wire_bytes(); }

  // --- its stages: see ReduceStage ---
  void set_replicas(Replicas* replicas);  // null: none
  void set_hook(bool is_hooked);
  void set_symmetric(SymmetricGradients* gradients);  // null: none
  // For them. In the dtype of the wire, on the stream's own memory: values, then counts.
  Tensor staging(StreamId stream, const char* owned_by) const;
  Sums sums_in(const Tensor& staged) const { return {&staged, 0, range_.numel()}; }
  Tensor values_of(const Sums& s) const { return s.flat->view({range_.numel()}, {1}, s.values); }
  Tensor counts_of(const Sums& s) const { return s.flat->view({range_.counts}, {1}, s.counts); }
  // Adds what was staged to `to`, or makes it that.
  void accumulate(Stream stream, const Tensor& to, const Tensor& staged, bool is_fresh) const;
  // Ranks that have kept or postponed differently are told so by the name. Only so, where units are
  // open and nothing is gathered: else one's reduction would meet its peer's of another
  // micro-batch.
  const char* with_what_was_kept(const char* name) const;

 private:
  // Of the unit's parameters that of this piece's entry.
  std::size_t parameter(std::size_t entry) const {
    return shards_.parameter_of()[layout_.first + entry];
  }
  std::size_t size() const noexcept { return layout_.end - layout_.first; }
  std::int64_t wire_bytes() const noexcept {
    return static_cast<std::int64_t>(size_bytes(shards_.reduce_dtype()));
  }
  std::int64_t shard_numel() const noexcept { return range_.numel() + range_.counts; }
  void begin_use();
  void complete();
  void postpone(ReduceStage& stage);
  double missing_bytes(std::size_t word) const;
  Tensor fresh_gradient() const;
  void scatter(const Sums& to);
  void list_items(const Sums& to, std::vector<Collective>& items) const;
  void clear_gaps(const Sums& sums) const;

  // Of the flat gradient: what this piece is reduced into, in elements.
  struct Range {
    std::int64_t begin = 0, end = 0;  // of the values, with the gaps between them
    std::int64_t counts = 0;          // how many, where the arrival counts lie
    std::int64_t counts_begin = 0;
    std::int64_t numel() const noexcept { return end - begin; }
  };

  const UnitShards& shards_;
  const PieceLayout& layout_;
  Stages<ReduceStage> stages_;
  PreparedGroups prepared_, prepared_apart_;
  Range range_;
  Tensor entries_, gaps_;  // tables of kernels::FlatSpan
  bool has_gaps_ = false;  // between or behind entries of the flat gradient
  Slot slot_;
  bool is_filling_ = false;          // from the first sink on
  std::shared_ptr<Storage> buffer_;  // the slot, while it is filled
  std::vector<Tensor> gradients_;    // of each entry, there
  std::uint64_t reduced_into_;       // FlatGroup::gradients when it was last reduced
  ArrivalMask arrived_;
  std::vector<Tensor> waiting_;  // of each entry what came without a slot
};

}  // namespace tessera::shard
