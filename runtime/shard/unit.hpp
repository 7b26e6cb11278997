// A unit: the parameters of one fully_shard call, and what happens around its module's calls. It
// drives the two that come and go with a call, and issues no collective itself.
//
//   forward    before_call: gather, open │ the module runs       │ after_call: close
//   backward   Context::enter: the same  │ nodes run, fill sinks │ Context::leave: close, reduce
//
//                        ┌─▶ GatheredParameters   gather, open, close
//   nn::Module ──▶ Unit ─┤
//   autograd   ──▶       └─▶ GradientBuffer       sink, reduce       (one rank: LocalGradient)
//
// PyTorch FSDP2: FSDPParamGroup with the hooks of its FSDPState.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/shard/context.hpp"
#include "runtime/shard/gathered_parameters.hpp"
#include "runtime/shard/gradient_buffer.hpp"
#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class Unit final : public nn::ModuleHook,
                   public GradientSinks,
                   public std::enable_shared_from_this<Unit> {
 public:
  // `is_read`: whether backward reads any of the parameters. `modules`: of a list.
  Unit(std::vector<std::shared_ptr<ParameterState>> parameters, const ShardOptions& options,
       bool is_read, std::vector<const nn::Module*> modules)
      : shards_(std::move(parameters), options), modules_(std::move(modules)), is_read_(is_read) {
    left_.reserve(modules_.size());
  }
  // One slice of a parameter that `unit` streams; see StreamedParameter.
  Unit(const Unit& unit, std::shared_ptr<ParameterState> slice);
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
  // Around any call. `is_read`: whether backward reads the parameters.
  void begin_call(bool is_read);
  void end_call();
  void abandon_call() noexcept;
  // Calls of a list, from the first until all modules have run or the outermost call ends, are one
  // round: it stays open through them, and backward reduces once, where it leaves the first. Of one
  // module each call is a round.
  bool is_list() const noexcept { return !modules_.empty(); }
  bool is_in_round() const noexcept { return !left_.empty(); }
  void begin_round();
  void end_round();
  void abandon_round() noexcept;
  // --- GradientSinks: where backward writes ---
  autograd::GradientSink sink(int i) override;
  void on_last_use(int i) override;
  void drop_unreduced(int i) override;

  // --- the steps: see GatheredParameters and GradientBuffer ---
  void gather();
  void open() { parameters_.open(); }
  void close() { parameters_.close(); }
  void note_uses() { parameters_.note_uses(); }
  // Or keeps them for a pass that does.
  void reduce();
  // Takes the memory that its gradients will need. `call_ends_next`: of the call entered last.
  void take_buffer(bool call_ends_next) {
    if (buffer_ && shards_.reduces) buffer_->take(call_ends_next && entered_calls_ == 1);
  }

  // --- what a program decides while it runs: see shard/runtime_control.hpp ---
  void unshard();
  void reshard();
  // Throws: ContractError inside of a call or of backward.
  void expect_between_steps(const char* function) const;
  void set_reshard_after_forward(Reshard when);
  void set_reshard_after_backward(bool reshards);
  bool reshards_after_backward() const noexcept { return reshards_after_backward_; }
  void set_unshard_in_backward(bool unshards) noexcept { is_read_ = unshards; }
  // Whose gathers are queued behind its own: when it is called, when backward enters it.
  enum class Prefetch : std::uint8_t { forward, backward };
  using PrefetchList = std::vector<std::weak_ptr<Unit>>;
  void set_prefetch(Prefetch where, PrefetchList units);
  const PrefetchList& prefetch_list(Prefetch where) const noexcept {
    return prefetch_[static_cast<std::size_t>(where)];
  }
  void gather_listed(Prefetch where);
  // Throws: ContractError where it has listed a unit of another root.
  void check_control() const;
  // Whether an update has come since it was opened outside of a call, or stayed open.
  bool is_stale() const noexcept { return parameters_.is_stale(); }
  // It lies inside the module of another unit.
  void set_inner() noexcept { is_inner_ = true; }
  bool is_inner() const noexcept { return is_inner_; }

  // --- its part of backward ---
  // One of its calls is entered, is left. `trains`: it may give gradients.
  void enter_call(bool trains) noexcept {
    ++entered_calls_;
    trains_ = trains_ || trains;
  }
  // Whether it is left with it: no call of it is entered, or comes in the same round.
  bool leave_call(bool ends_round) noexcept {
    awaits_calls_ = !ends_round;
    return --entered_calls_ == 0 && ends_round;
  }
  bool awaits_calls() const noexcept { return awaits_calls_; }
  bool trains() const noexcept { return trains_; }
  bool is_in_backward() const noexcept { return entered_calls_ > 0; }
  // Counts updates of its parameters. A recomputed call of it must find this version, forward's.
  std::uint64_t version() const noexcept { return parameters_.version(); }
  void expect_version(std::uint64_t version) noexcept { forward_version_ = version; }
  // Whether a gradient came since the last reduction.
  bool owes_reduction() const noexcept { return owes_reduction_; }

  // --- what it is ---
  const UnitShards& shards() const noexcept { return shards_; }
  const std::string& name() const noexcept { return shards_.name; }
  bool is_root() const noexcept { return is_root_; }
  bool keeps_open() const noexcept { return keeps_open_; }
  // Through the turn from forward to backward, if it is next there.
  bool may_stay() const noexcept {
    return shards_.options.reshard_after_forward == Reshard::automatic;
  }
  bool is_in_call() const noexcept { return call_depth_ > 0; }
  ShardPlan::Unit describe() const;
  // Follows what was frozen or thawed since; between steps.
  void lay_out();
  // Cuts what it streams into slices of `bytes` at most.
  void cut_streamed(std::int64_t bytes);
  // Collectives of one forward and backward, as the plan prints them.
  void expect(int gathers, int reductions) noexcept {
    planned_gathers_ = gathers;
    planned_reductions_ = reductions;
  }

  // --- what its reductions do, between steps ---
  void set_reduces(bool reduces) noexcept { shards_.reduces = shards_.all_reduces = reduces; }
  void set_all_reduces(bool all_reduces) noexcept { shards_.all_reduces = all_reduces; }
  void set_divide_factor(double factor);

  // --- its root ---
  const std::shared_ptr<Context>& context() const noexcept { return context_; }
  void join(std::shared_ptr<Context> context, std::string name, int number);
  // `parent`: the number of the unit around it.
  UnitNeeds needs(int parent) const;
  bool is_read_in_backward() const noexcept { return is_read_; }
  void set_slots(Slots* slots, Replicas* replicas, HostLink* host) noexcept {
    shards_.slots = slots;
    shards_.replicas = replicas;
    shards_.host = host;
  }
  void set_neighbours(const RankGroup* group) { parameters_.keep_over(group); }
  // The most that the reduce-scatter of a piece leaves on this rank.
  std::int64_t most_shard_bytes() const noexcept {
    return buffer_ ? buffer_->most_shard_bytes() : 0;
  }

  // --- after a failure ---
  void abandon_call(nn::Module&) noexcept override { abandon_call(); }
  // After a pass that failed: closed, and what the pass has done to the gradient is dropped with
  // it.
  void abandon_backward() noexcept;
  // After a step that failed: closed, without any gradient.
  void reset() noexcept;
  // As before the first step: without a root.
  void detach() noexcept;
  // A slice that is there no more.
  void leave() noexcept;
  // Throws: ContractError for what a step that was reset has left.
  void expect_no_recovery_since(std::uint64_t recovery_count) const;
  // All ranks have agreed whether their parameters are consistent.
  void set_consistent(bool is_consistent) noexcept;

 private:
  void make_buffer();
  void set_unreduced(bool is_unreduced);
  void drop_kept() noexcept;
  void for_each_slice(const std::function<void(Unit&)>& f) const;
  void expect_valid() const;

  UnitShards shards_;
  // Of a list: which; those that have still to run in the round that has begun.
  std::vector<const nn::Module*> modules_, left_;
  bool round_trains_ = false;  // a call of it has a region,
  bool round_reads_ = false;   // and backward reads the parameters
  bool is_read_;
  // Above what has slots of it, which give them back first when the unit goes.
  std::shared_ptr<Context> context_;
  bool is_root_ = false, is_inner_ = false;
  bool keeps_open_ = false, reshards_after_backward_ = true;
  PrefetchList prefetch_[2];

  // With something to train: several ranks or shards on the host; one rank without these.
  std::unique_ptr<GradientBuffer> buffer_;
  std::shared_ptr<LocalGradient> local_;
  GatheredParameters parameters_{shards_};
  int planned_gathers_ = 0, planned_reductions_ = 0;

  int call_depth_ = 0;                          // a module may call itself
  std::optional<autograd::RegionGuard> guard_;  // of the call that runs, for training

  int entered_calls_ = 0;
  bool awaits_calls_ = false;          // of a round of which some have been left
  bool trains_ = false;                // one of these
  std::uint64_t forward_version_ = 0;  // of the call entered last
  bool owes_reduction_ = false;
  std::uint64_t reduced_in_ = 0;  // the backward pass of the last reduction
};

// Of modules of which none lies inside of another; see fully_shard.
void make_unit(const std::vector<nn::Module*>& modules, const ShardOptions& options);

}  // namespace tessera::shard
