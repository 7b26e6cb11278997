// A unit: the parameters of one fully_shard call, and what happens around its module's calls. It
// drives the two that come and go with a call, and issues no collective itself.
//
//   forward    before_call: gather, open │ the module runs       │ after_call: close
//   backward   Context::enter: the same  │ nodes run, fill sinks │ Context::leave: close, reduce
//
//                        ┌─▶ GatheredParameters   gather, open, close
//   nn::Module ──▶ Unit ─┼─▶ GradientBuffer       sink, reduce       (one rank: LocalGradient)
//   autograd   ──▶       └─▶ UnitCalls, UnitControl   where it is; what the program has decided
//
// PyTorch FSDP2: FSDPParamGroup with the hooks of its FSDPState.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/shard/context.hpp"
#include "runtime/shard/gathered_parameters.hpp"
#include "runtime/shard/gradient_buffer.hpp"
#include "runtime/shard/unit_calls.hpp"
#include "runtime/shard/unit_control.hpp"
#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class Unit final : public nn::ModuleHook,
                   public GradientSinks,
                   public std::enable_shared_from_this<Unit> {
 public:
  // `is_read`: whether backward reads any of the parameters. `modules`: of a list.
  Unit(std::vector<std::shared_ptr<ParameterState>> parameters, const ShardOptions& options,
       bool is_read, std::vector<const nn::Module*> modules)
      : shards_(std::move(parameters), options),
        control_(shards_, is_read),
        calls_(std::move(modules)) {}
  // One slice of a parameter that `unit` streams; see StreamedParameter.
  Unit(const Unit& unit, std::shared_ptr<ParameterState> slice, bool is_read);
  ~Unit() override;

  // --- nn::ModuleHook: around the module's calls ---
  void materialize(const Device& device) override;
  std::optional<DType> input_dtype() const override {
    const MixedPrecision& precision = shards_.options.precision;
    return precision.cast_forward_inputs ? precision.param : std::nullopt;
  }
  std::optional<DType> output_dtype() const override { return shards_.options.precision.output; }
  void before_call(nn::Module& module) override;
  void after_call(nn::Module& module) override;
  void abandon_call(nn::Module&) noexcept override { abandon_call(); }
  // Around any call. `is_read`: whether backward reads the parameters.
  void begin_call(bool is_read);
  void end_call();
  void abandon_call() noexcept;
  void end_round();
  void abandon_round() noexcept;
  // --- GradientSinks: where backward writes ---
  autograd::GradientSink sink(int i) override;
  void on_last_contribution(int i) override;
  void drop_unreduced(int i) override;

  // --- the steps: see GatheredParameters and GradientBuffer ---
  void gather();
  void gather_listed(UnitControl::Prefetch where);
  void open() { parameters_.open(); }
  void close() { parameters_.close(); }
  void note_uses() { parameters_.note_uses(); }
  // Whether an update has come since it was opened outside of a call, or stayed open.
  bool is_stale() const noexcept { return parameters_.is_stale(); }
  // A call is entered that may give gradients: takes the memory that these will need.
  // `call_ends_next`: no call of another unit comes inside.
  void take_buffer(bool call_ends_next) {
    trains_ = true;
    if (buffer_ && shards_.reduces) buffer_->take(call_ends_next && calls_.entered() == 1);
  }
  // Reduces these gradients, or keeps them for a pass that reduces.
  void reduce();
  // It is open outside of its calls: a pass that comes reduces it, whichever ranks have used it.
  void may_be_used() noexcept { may_be_used_ = may_be_used_ || autograd::history_is_wanted(); }
  // Whether gradients may have come since the last reduction: within calls, or at all.
  bool trains() const noexcept { return trains_; }
  bool owes_reduction() const noexcept {
    return owes_reduction_ || trains_ || may_be_used_ || calls_.is_running() ||
           (waits_ && !is_postponed());
  }

  // --- what it is ---
  const UnitShards& shards() const noexcept { return shards_; }
  const std::string& name() const noexcept { return shards_.name; }
  UnitControl& control() noexcept { return control_; }
  UnitCalls& calls() noexcept { return calls_; }
  // `gathers`, `reductions`: of one forward and backward.
  ShardPlan::Unit describe(int gathers, int reductions) const;
  // Follows what was frozen or thawed since; between steps.
  void lay_out();

  // --- its root ---
  const std::shared_ptr<Context>& context() const noexcept { return context_; }
  void join_root(std::shared_ptr<Context> context, std::string name, int number);
  // `parent`: the number of the unit around it.
  UnitNeeds needs(int parent) const;
  void set_slots(Slots* slots, Replicas* replicas, HostLink* host) noexcept {
    shards_.slots = slots;
    shards_.replicas = replicas;
    shards_.host = host;
  }
  // See GatheredParameters::keep_over. What backward does not read is not kept for it.
  void set_neighbours(const RankGroup* group) {
    parameters_.keep_over(control_.is_read_in_backward() ? group : nullptr);
  }
  // The most that the reduce-scatter of a piece leaves on this rank.
  std::int64_t most_shard_bytes() const noexcept;

  // --- after a failure ---
  // After a pass that failed: closed, and what the pass has done to the gradient is dropped with
  // it.
  void abandon_backward() noexcept;
  // Drops what backward has kept of its gradients without reducing it.
  void drop_kept() noexcept;
  // After a step that failed: closed, without any gradient.
  void reset() noexcept;
  // Has no root any more: as before the first step, or a slice that is there no more.
  void leave_root() noexcept;
  // Throws: ContractError for what a step that was reset has left.
  void expect_no_recovery_since(std::uint64_t recovery_count) const;

 private:
  void make_buffer();
  void set_unreduced(bool is_unreduced);
  // Of a call that begins or has ended: it is the root's, or no other runs.
  bool is_forward() const {
    return !autograd::in_backward() && (shards_.is_root() || !context_->is_in_call());
  }
  bool is_postponed() const { return !shards_.reduces || shards_.postpones_all_reduce(); }

  UnitShards shards_;
  UnitControl control_;
  UnitCalls calls_;
  // Above what has slots of it, which give them back first when the unit goes.
  std::shared_ptr<Context> context_;

  // With something to train: several ranks or shards on the host; one rank without these.
  std::unique_ptr<GradientBuffer> buffer_;
  std::shared_ptr<LocalGradient> local_;
  GatheredParameters parameters_{shards_};

  // `waits_`: what it may have been given outside of its calls is left to a pass that reduces.
  bool trains_ = false, owes_reduction_ = false, may_be_used_ = false, waits_ = false;
  std::uint64_t reduced_in_ = 0;  // the backward pass of the last reduction
  std::vector<Event> forwards_;   // ends, as many at most as the host may be ahead
};

// Of modules of which none lies inside of another; see fully_shard.
void make_unit(const std::vector<nn::Module*>& modules, const ShardOptions& options);
// Throws: ContractError where parameters that a unit has claimed refuse its mesh or options.
void check_claimed(const std::vector<std::shared_ptr<ParameterState>>& claimed,
                   const ShardOptions& options, const std::string& of);
// Throws: ContractError for a unit without memory, and for another mesh or place than its root's.
void check_under_root(const UnitShards& unit, const std::string& name, const UnitShards& root);
void note_made(const std::shared_ptr<Unit>& unit, const std::vector<nn::Module*>& modules);
// A module in a message, while it has no name: "the module of 'blocks.0.weight'".
std::string called(const nn::Module& module);

}  // namespace tessera::shard
