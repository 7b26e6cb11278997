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
  DType param_dtype() const noexcept { return options_.precision.param.value_or(f32); }
  DType reduce_dtype() const noexcept { return options_.precision.reduce.value_or(f32); }
  // Whether the full tensors need a slot: not where one rank computes in the shards' own dtype.
  bool needs_slot() const noexcept { return size() > 1 || param_dtype() != f32; }
  bool is_root() const noexcept { return is_root_; }
  bool keeps_open() const noexcept { return keeps_open_; }
  bool is_materialized() const noexcept { return trainable_ || frozen_; }
  int size() const noexcept { return options_.mesh.shard_size(); }
  ShardPlan::Unit describe() const;

  void join(std::shared_ptr<Context> context, std::string name, bool is_root);
  void set_rings(SlotRing* gather, SlotRing* reduce) {
    gather_ring_ = gather;
    reduce_ring_ = reduce;
  }

  // --- the steps ---
  // Queues the gather unless it is queued or done.
  void gather();
  // Makes the full tensors usable by later work on the compute stream.
  void open();
  void close();
  void close_unchecked() noexcept;
  bool is_closed() const noexcept { return state_ == UnitState::closed; }
  // Reduces what backward has left, zeros included, and lets go of the run.
  void reduce();
  // Whether the unit was opened for training since its last reduction.
  bool owes_reduction() const noexcept { return owes_reduction_; }
  // The place of a gradient of the trainable group's entry.
  autograd::Leaf::Target take(int entry);

 private:
  void advance(UnitState from, UnitState to);
  void check_escapes() const;
  bool is_stale() const noexcept;
  std::uint64_t version() const noexcept;
  void pack(const FlatGroup& group, const Tensor& table);
  void make_tables();
  void take_run();
  void complete_run();
  Tensor fresh_gradient();
  void clear_gaps(Stream stream, const Tensor& flat, const Tensor& table);
  CollectiveGroup& prepare(const char* name, StreamId stream);

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
  std::optional<autograd::RegionGuard> guard_;
  bool owes_reduction_ = false;

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
  std::vector<std::unique_ptr<Prepared>> prepared_;
};

// One call of a unit's module, as backward sees it.
class UnitRegion final : public autograd::Region {
 public:
  explicit UnitRegion(std::shared_ptr<Unit> unit) : unit_(std::move(unit)) {}
  void backward_begins() override;
  void backward_ends() override;

  Unit& unit() const noexcept { return *unit_; }
  bool has_begun() const noexcept { return begun_; }
  void skip() noexcept { begun_ = true; }

 private:
  std::shared_ptr<Unit> unit_;
  bool begun_ = false;
};

}  // namespace tessera::shard
