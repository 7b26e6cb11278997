// A unit: the parameters of one fully_shard call, and the life of their full tensors and gradients.
//
//   closed ──gather──▶ gathering ──open──▶ open ──close──▶ closed
//              │ slot taken,        │ compute waits,   │ windows shut,
//              │ all-gather queued  │ windows set      │ slot given back
//
// The module's call and the region of its nodes in backward drive these steps; nothing here blocks
// the host.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/shard/context.hpp"
#include "tessera/memory/slots.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/layout.hpp"

namespace tessera::shard {

enum class UnitState : std::uint8_t { closed, gathering, open };
constexpr const char* name(UnitState s) {
  return s == UnitState::closed ? "closed" : s == UnitState::gathering ? "gathering" : "open";
}

class Unit final : public nn::ModuleHook, public std::enable_shared_from_this<Unit> {
 public:
  Unit(std::vector<std::shared_ptr<ParameterState>> parameters, const ShardOptions& options);
  ~Unit() override;

  // --- nn::ModuleHook ---
  void before_call(nn::Module& module) override;
  void after_call(nn::Module& module) override;
  void abandon_call(nn::Module& module) noexcept override;
  void materialize(const Device& device) override;

  // --- what Context asks for ---
  const std::string& name() const noexcept { return name_; }
  const ShardOptions& options() const noexcept { return options_; }
  const UnitLayout& layout() const noexcept { return layout_; }
  const Context* context() const noexcept { return context_.get(); }
  const std::shared_ptr<Context>& shared_context() const noexcept { return context_; }
  DType param_dtype() const noexcept { return options_.precision.param.value_or(f32); }
  DType reduce_dtype() const noexcept { return options_.precision.reduce.value_or(f32); }
  // Whether the full tensors need a slot: not where one rank computes in the shards' own dtype.
  bool needs_slot() const noexcept { return size() > 1 || param_dtype() != f32; }
  bool is_root() const noexcept { return is_root_; }
  bool keeps_open() const noexcept { return keeps_open_; }
  bool has_own_slot() const noexcept { return keeps_open_ || is_root_; }
  bool is_materialized() const noexcept { return trainable_ || frozen_; }
  int size() const noexcept { return options_.mesh.shard_size(); }
  ShardPlan::Unit describe() const;

  void join(std::shared_ptr<Context> context, std::string name, bool is_root);
  void leave() noexcept;
  void set_rings(SlotRing* gather, SlotRing* reduce) {
    gather_ring_ = gather;
    reduce_ring_ = reduce;
  }

  // --- the steps ---
  // Queues the gather unless it is queued or done.
  void gather();
  // Makes the full tensors usable by later work on the compute stream.
  void open();
  // Throws, closed all the same: ContractError for a full tensor that somebody still holds.
  void close();
  void close_unchecked() noexcept;
  // Reduces what backward has left, zeros included, and lets go of the run.
  void reduce();
  // Whether a gradient came since the last reduction.
  bool owes_reduction() const noexcept { return owes_reduction_; }
  // The backward pass of the last reduction.
  std::uint64_t reduced_in() const noexcept { return reduced_in_; }
  // Whether one of its calls is in its part of backward.
  bool is_running() const noexcept { return running_ > 0; }
  // After a pass that failed: closed, and what the pass has done to the gradient is dropped with
  // it.
  void abandon_backward() noexcept;
  // After a step that failed: closed, without any gradient.
  void reset() noexcept;
  bool is_in_call() const noexcept { return scope_depth_ > 0; }
  const std::shared_ptr<FlatGroup>& trainable() const noexcept { return trainable_; }
  // Throws: ContractError for what a step that was reset has left.
  void expect_epoch(std::uint64_t epoch) const;
  // All ranks have agreed whether their parameters are whole.
  void set_whole(bool is_whole) noexcept;
  // The sink of a gradient of the trainable group's entry.
  autograd::GradientSink sink(int entry);

 private:
  void advance(UnitState from, UnitState to);
  std::shared_ptr<UnitRegion> make_region();
  std::string escape() const;
  bool is_stale() const noexcept;
  std::uint64_t version() const noexcept;
  void fill_slot();
  void pack(const FlatGroup& group, const Tensor& table);
  void make_tables();
  void give_back(SlotRing& ring, const Slot& slot) noexcept;
  void take_run();
  void drop_run() noexcept;
  void complete_run();
  double missing_part(std::size_t word) const;
  Tensor fresh_gradient();
  void clear_gaps(Stream stream, const Tensor& flat, const Tensor& table);
  CollectiveGroup& prepare(const char* name, StreamId stream);

  friend class UnitRegion;
  ShardOptions options_;
  std::string name_ = "(not yet named)";
  std::vector<std::shared_ptr<ParameterState>> parameters_;
  UnitLayout layout_;
  std::shared_ptr<Context> context_;
  bool is_root_ = false;
  bool keeps_open_ = false;
  Device device_ = Device::meta();

  std::shared_ptr<FlatGroup> trainable_, frozen_;
  std::shared_ptr<LocalGradient> local_;        // one rank: gradients go straight into the group
  Tensor pack_trainable_, pack_frozen_;         // tables of kernels::PackEntry
  Tensor run_places_, gaps_f32_, gaps_reduce_;  // tables of kernels::PlaceEntry

  UnitState state_ = UnitState::closed;
  SlotRing* gather_ring_ = nullptr;
  SlotRing* reduce_ring_ = nullptr;
  Slot slot_;
  Event gathered_;
  std::uint64_t gathered_version_ = 0;

  int scope_depth_ = 0;
  std::shared_ptr<UnitRegion> region_;  // of the call that runs, null without training
  std::optional<autograd::RegionGuard> guard_;
  int running_ = 0;
  bool owes_reduction_ = false;
  std::uint64_t reduced_in_ = 0;
  const char *gather_name_ = "", *reduce_name_ = "";  // of the operations

  std::shared_ptr<Storage> run_;  // the run being filled, null for none
  Slot run_slot_;
  std::vector<std::uint64_t> arrived_;
  std::vector<bool> held_;

  // Prepared submissions, reused once the host knows that they have run.
  struct Prepared {
    CollectiveGroup group;
    StreamId stream = StreamId::gather;
    Tick tick = 0;
  };
  std::vector<std::shared_ptr<Prepared>> prepared_;
};

// One call of a unit's module for training, as backward sees it.
class UnitRegion final : public autograd::Region {
 public:
  // `outer`: the region around it, of a unit under the same root, or null. `recomputed`: its nodes
  // come in backward.
  UnitRegion(std::shared_ptr<Unit> unit, const UnitRegion* outer, bool recomputed);
  // In backward, with all nodes of `outer` that come before its own.
  void comes_again(const UnitRegion* outer) noexcept;
  void backward_begins() override;
  void backward_ends() override;

  Unit& unit() const noexcept { return *unit_; }
  const std::shared_ptr<Call>& call() const noexcept { return call_; }
  Forward& forward() const noexcept { return *forward_; }
  const std::shared_ptr<Forward>& shared_forward() const noexcept { return forward_; }
  // Its part of backward has begun, and has ended.
  void runs() noexcept { unit_->running_ += std::exchange(running_, true) ? 0 : 1; }
  void rests() noexcept { unit_->running_ -= std::exchange(running_, false) ? 1 : 0; }

 private:
  std::shared_ptr<Unit> unit_;
  std::shared_ptr<Forward> forward_;
  std::shared_ptr<Call> call_;
  bool recomputed_ = false;
  bool running_ = false;
};

}  // namespace tessera::shard
