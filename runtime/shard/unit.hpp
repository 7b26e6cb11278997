// A unit: the parameters of one fully_shard call, and what happens around its module's calls. It
// drives the two that come and go with a call, and issues no collective itself.
//
//   forward    before_call: gather, open    │ the module runs       │ after_call: close
//   backward   BackwardOrder::enter: likewise │ nodes run, fill sinks │ leave: reduce, close
//
//                        ┌─▶ GatheredParameters   gather, open, close
//   nn::Module ──▶ Unit ─┼─▶ GradientBuffer       sink, reduce       (one rank: LocalGradient)
//   autograd   ──▶       └─▶ UnitCalls            where it is
//
// PyTorch FSDP2: FSDPParamGroup with the hooks of its FSDPState.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/shard/gathered_parameters.hpp"
#include "runtime/shard/gradient_buffer.hpp"
#include "runtime/shard/root.hpp"
#include "runtime/shard/unit_calls.hpp"
#include "runtime/shard/unit_shards.hpp"

namespace tessera::shard {

class Unit final : public nn::ModuleHook,
                   public GradientSinks,
                   public std::enable_shared_from_this<Unit> {
 public:
  // Where the gathers of listed units are queued behind its own: in its call, or in backward.
  enum class Prefetch : std::uint8_t { forward, backward };
  using PrefetchList = std::vector<std::weak_ptr<Unit>>;

  // `is_read`: whether backward reads any of the parameters. `modules`: of a list.
  Unit(std::vector<std::shared_ptr<ParameterState>> parameters, const ShardOptions& options,
       bool is_read, std::vector<const nn::Module*> modules)
      : shards_(std::move(parameters), options),
        reshard_(options.reshard_after_forward),
        may_be_read_(is_read),
        is_read_(is_read),
        calls_(std::move(modules)) {}
  // One slice of a parameter that `unit` streams; see StreamedParameter.
  Unit(const Unit& unit, std::shared_ptr<ParameterState> slice, bool is_read);
  ~Unit() override;

  // --- nn::ModuleHook: around the module's calls ---
  void materialize(const Device& device) override;
  std::optional<DType> input_dtype() const override {
    const MixedPrecision& precision = shards_.options().precision;
    return precision.cast_forward_inputs ? precision.param : std::nullopt;
  }
  std::optional<DType> output_dtype() const override { return shards_.options().precision.output; }
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
  void gather_listed(Prefetch where);
  void open() { parameters_.open(); }
  void close() { parameters_.close(); }
  void note_uses() { parameters_.note_uses(); }
  // Whether an update has come since it was opened outside of a call, or stayed open.
  bool is_stale() const noexcept { return parameters_.is_stale(); }
  // A call is entered that may give gradients: takes the memory that these will need.
  // `call_ends_next`: no call of another unit comes inside.
  void take_buffer(bool call_ends_next) {
    trains_ = true;
    if (buffer_ && shards_.reductions().reduces)
      buffer_->take(call_ends_next && calls_.entered() == 1);
  }
  // Reduces these gradients, or keeps them for a pass that reduces.
  void reduce();
  // It is open outside of its calls: the backward that comes reduces it, whichever ranks have used
  // it. Of a use before the root's next forward that is the forward's.
  void may_be_used() noexcept {
    may_be_used_ = true;
    used_before_ = 0;
  }
  void note_forward(std::uint64_t number) noexcept {
    if (may_be_used_ && used_before_ == 0) used_before_ = number;
  }
  // Whether gradients are kept unreduced that a pass has to bring in.
  bool owes_kept() const noexcept { return keeps_ && !is_postponed(); }
  // Reduces them, whatever the program has decided.
  void bring_in_kept();
  // Whether gradients may have come since the last reduction: within calls, or at all.
  bool trains() const noexcept { return trains_; }
  // `forward`: the number of the one whose part of the pass ends, 0 of the pass itself.
  bool owes_reduction(std::uint64_t forward) const noexcept {
    return trains_ || calls_.is_running() || owes_kept() ||
           (may_be_used_ && (used_before_ == 0 || used_before_ == forward));
  }
  // Reduces what this rank has been given outside of calls, maybe alone.
  void reduce_given();

  // --- what it is ---
  const UnitShards& shards() const noexcept { return shards_; }
  const std::string& name() const noexcept { return shards_.name(); }
  UnitCalls& calls() noexcept { return calls_; }
  // `gathers`, `reductions`: of one forward and backward.
  ShardPlan::Unit describe(int gathers, int reductions) const;
  // Follows what was frozen or thawed since; between steps.
  void lay_out();

  // --- what a program decides while it runs: see shard/runtime_control.hpp ---
  void set_reshard_after_forward(Reshard when);
  void set_reshard_after_backward(bool reshards);
  void set_unshard_in_backward(bool unshards);
  void set_prefetch(Prefetch where, PrefetchList units);
  void set_reduces(bool reduces);
  void set_all_reduces(bool all_reduces);
  void set_divide_factor(double factor);
  void set_reductions_in_flight(int reductions);
  // Ranks that differ are told so by the name of the reduction.
  void set_all_reduce_hook(AllReduceHook hook, std::optional<StreamId> stream);
  // What changes gathers, their order or what is reduced stands behind the name of the unit's own
  // gather: ranks that have decided otherwise hear so, and not of what differs then.
  void name_decisions();
  bool has_decisions() const noexcept { return !shards_.decisions().empty(); }
  // Tells the root what it has to expect.
  // Throws: ContractError where a unit of another root is listed.
  void check_prefetch_lists(Root& root) const;
  // Open behind its call. `backward_comes`: it was made for training.
  bool keeps_open(bool backward_comes = true) const noexcept {
    return shards_.options().reshard_after_forward == Reshard::never ||
           (backward_comes && may_stay() && shards_.is_root());
  }
  // Through the turn from forward to backward, if it is next there.
  bool may_stay() const noexcept {
    return shards_.options().reshard_after_forward == Reshard::automatic;
  }
  bool reshards_after_backward() const noexcept { return reshards_after_backward_; }
  bool is_read_in_backward() const noexcept { return is_read_; }
  const PrefetchList& prefetch_list(Prefetch where) const noexcept {
    return prefetch_[static_cast<std::size_t>(where)];
  }
  // It lies inside the module of another unit.
  void set_inner() noexcept { is_inner_ = true; }
  bool is_inner() const noexcept { return is_inner_; }

  // --- its root ---
  const std::shared_ptr<Root>& root() const noexcept { return root_; }
  void join_root(std::shared_ptr<Root> root, std::string name, int number);
  // `parent`: the number of the unit around it.
  UnitNeeds needs(int parent) const;
  void set_slots(Slots* slots, Replicas* replicas, HostLink* host, SymmetricGradients* gradients) {
    shards_.share(slots, host);
    if (!buffer_) return;
    if (shards_.has_replicas()) buffer_->set_replicas(replicas);
    if (shards_.has_windows()) buffer_->set_symmetric(gradients);
  }
  // See GatheredParameters::keep_over. What backward does not read is not kept for it.
  void set_neighbours(const RankGroup* group) {
    parameters_.keep_over(is_read_in_backward() ? group : nullptr);
  }
  // Its parameters go to another unit of the same modules, and its root has no units any more.
  // Throws: ContractError where backward may still come for a forward, or has kept gradients.
  void let_go();
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
    return !autograd::in_backward() && (shards_.is_root() || !root_->is_in_call());
  }
  bool is_postponed() const noexcept {
    return !shards_.reductions().reduces || shards_.postpones_all_reduce();
  }

  UnitShards shards_;
  const Reshard reshard_;   // what fully_shard was given,
  const bool may_be_read_;  // and found: whether backward reads any of the parameters
  bool is_read_, is_inner_ = false, reshards_after_backward_ = true;
  PrefetchList prefetch_[2];
  UnitCalls calls_;
  // Above what has slots of it, which give them back first when the unit goes.
  std::shared_ptr<Root> root_;

  // With something to train: several ranks or shards on the host; one rank without these.
  std::unique_ptr<GradientBuffer> buffer_;
  std::shared_ptr<LocalGradient> local_;
  GatheredParameters parameters_{shards_};

  bool trains_ = false, is_given_ = false, may_be_used_ = false;
  bool keeps_ = false;             // gradients that it has not reduced
  std::uint64_t used_before_ = 0;  // which forward; 0: none has come since
  std::uint64_t reduced_in_ = 0;   // the backward pass of the last reduction
  std::vector<Event> forwards_;    // ends, as many at most as the host may be ahead
};

// Throws: ContractError, in the names of `function` and of the unit, where so many ranks can't keep
// parts.
void check_reshard(const char* function, const std::string& unit, Reshard reshard,
                   const DeviceMesh& mesh,
                   std::span<const std::shared_ptr<ParameterState>> parameters);
// A module in a message, while it has no name: "the module of 'blocks.0.weight'".
std::string called(const nn::Module& module);

}  // namespace tessera::shard
