#include "runtime/shard/unit.hpp"

#include <algorithm>
#include <utility>

namespace tessera::shard {

Unit::Unit(const Unit& unit, std::shared_ptr<ParameterState> slice, bool is_read)
    : shards_(unit.shards_, std::move(slice)),
      reshard_(shards_.options().reshard_after_forward),
      may_be_read_(is_read),
      is_read_(is_read),
      local_(unit.local_) {
  set_reshard_after_backward(unit.reshards_after_backward());
  parameters_.materialize();
  make_buffer();
}

void Unit::materialize(const Device& device) {
  if (shards_.is_materialized() && shards_.device() == device) return;
  shards_.materialize(device);
  if (shards_.group() && !shards_.has_buffer())
    local_ = std::make_shared<LocalGradient>(shards_.group());
  parameters_.materialize();
  make_buffer();
}

void Unit::lay_out() {
  if (!shards_.group() || shards_.group()->is_laid_out) return;
  close();
  shards_.lay_out();
  make_buffer();
}

void Unit::make_buffer() {
  for (const auto& p : shards_.parameters())
    p->sinks = {std::shared_ptr<void>(), this};  // owns none
  buffer_ = nullptr;
  keeps_ = false;
  if (!shards_.parameter_of().empty() && shards_.has_buffer())
    buffer_ = std::make_unique<GradientBuffer>(shards_);
}

void Unit::let_go() {
  if (shards_.group())
    shards_.group()->expect_reduced("fully_shard", 0, shards_.group()->unreduced.size());
  if (const auto root = root_) {
    root->expect_covered(concat("unit '", name(), "' takes in parameters"));
    root->dismiss();
  }
  for (const auto* const part : {&shards_.parameters(), &shards_.streamed()})
    for (const auto& p : *part) {
      p->unit = nullptr;
      p->slices = nullptr;
      p->full = nullptr;
      p->sinks = nullptr;
    }
  shards_.let_go();
}

// A handle, a graph or an optimizer that outlives the unit keeps no slice, whose unit would keep
// the slots, writes no gradient, and an error finds a name.
Unit::~Unit() {
  drop_kept();
  static const std::string gone = "(gone)";
  for (const auto& part : {shards_.parameters(), shards_.streamed()})
    for (const auto& p : part) {
      p->unit = &gone;
      p->slices = nullptr;
      p->full = nullptr;
      p->sinks = nullptr;
      if (p->window) p->window->unit = &gone;
    }
}

// --- the module's calls ---

void Unit::before_call(nn::Module& module) {
  const bool is_outermost = !calls_.is_running();
  if (!root_)
    Root::build(module);
  else if (shards_.is_root() && is_outermost)
    root_->follow(module);
  begin_call(is_read_in_backward());
  if (calls_.is_list() && is_outermost && calls_.entered() == 0 && !calls_.is_in_round()) {
    calls_.begin_round();
    root_->begin_round(shards_.number());
  }
}

void Unit::begin_call(bool is_read) {
  root_->expect_valid(name());
  if (calls_.is_running()) {
    if (autograd::runs_again() && !autograd::in_backward()) calls_.record_call_again();
    return calls_.begin_call();
  }
  if (calls_.entered() > 0) {  // open: a recomputed function runs again
    TESSERA_EXPECT(parameters_.version() == calls_.version(), "backward: the parameters of unit '",
                   name(),
                   "' were updated after the forward that is recomputed; run backward first");
  } else {
    if (is_forward()) root_->begin_forward(forwards_, shards_.is_root());
    if (is_stale() && !autograd::in_backward()) close();
    gather();
    open();
    if (!autograd::in_backward() && !calls_.is_in_round()) gather_listed(Prefetch::forward);
  }
  const bool trains = autograd::history_is_wanted(), runs_again = autograd::runs_again();
  if (trains && !autograd::in_backward()) shards_.expect_gradients();
  if ((trains || runs_again) && !autograd::in_backward())
    calls_.record_call(shared_from_this(),
                       {.gradients = trains,
                        .parameters = runs_again || is_read,
                        .version = parameters_.version()},
                       shards_.is_root() ? root_->backward().begin_recorded() : 0);
  root_->begin_call();
  calls_.begin_call();
}

void Unit::after_call(nn::Module& module) {
  if (calls_.is_in_round() && calls_.entered() == 0) calls_.note_run(module);
  end_call();
}

void Unit::end_call() {
  if (!calls_.end_call()) return;
  const bool is_outermost = root_->end_call();
  if (is_forward()) forwards_.push_back(shards_.device().compute().record());
  // In backward its part of that ends it.
  if (calls_.entered() == 0 && !calls_.is_in_round()) end_round();
  if (is_outermost) root_->end_rounds();
}

void Unit::end_round() {
  const UnitCalls::Round round = calls_.end_round();
  if (keeps_open(round.is_recorded)) return;
  if (round.is_read) parameters_.keep_part();
  parameters_.close(round.is_recorded && may_stay());
}

autograd::GradientSink Unit::sink(int i) {
  TESSERA_EXPECT(root_ != nullptr, "backward: a parameter of unit '", name(),
                 "' was sharded since the forward that used it; run backward before that");
  root_->backward().schedule_end();
  is_given_ = true;
  return local_ ? local_->sink(i, 1 / shards_.reductions().divide_factor) : buffer_->sink(i);
}

void Unit::on_last_contribution(int i) {
  if (!buffer_ || !buffer_->on_last_contribution(i)) return;
  reduced_in_ = root_->backward().pass();
  root_->backward().on_reduced(shards_.group()->reduced);
}

// --- the steps ---

void Unit::gather() {
  if (parameters_.gather(root_->name_of_gather(shards_))) root_->count_gather();
}

void Unit::reduce() {
  is_given_ = trains_ = may_be_used_ = false;
  reduced_in_ = root_->backward().pass();
  if (local_) local_->complete();
  if (!buffer_) return;
  if (shards_.reductions().reduces) buffer_->reduce();
  set_unreduced(is_postponed());
  if (!shards_.reductions().reduces) return;
  root_->backward().on_reduced(shards_.group()->reduced);
  if (shards_.ranks() > 1) root_->count_reduction(shards_.has_replicas() && !is_postponed());
}

void Unit::reduce_given() {
  if (!is_given_) return;
  const struct Named {
    UnitShards& shards;
    ~Named() { shards.set_given_outside(false); }
  } named{shards_};
  shards_.set_given_outside(true);
  reduce();
}

// --- its root ---

void Unit::join_root(std::shared_ptr<Root> root, std::string name, int number) {
  root_ = std::move(root);
  shards_.join_root(root_->number(), std::move(name), number);
}

UnitNeeds Unit::needs(int parent) const {
  std::vector<std::int64_t> pieces;
  if (shards_.has_buffer())
    for (const PieceLayout& piece : shards_.layout().pieces) pieces.push_back(piece.bytes);
  return {.parent = parent,
          .keeps_open = keeps_open(),
          .may_stay = may_stay(),
          .gather_bytes = shards_.gather_bytes(),
          .pieces = pieces,
          .prefetch_depth = shards_.options().prefetch_depth,
          .reductions_in_flight = shards_.options().reductions_in_flight};
}

std::int64_t Unit::most_shard_bytes() const noexcept {
  std::int64_t most = 0;
  if (buffer_)
    for (const GradientPiece& piece : buffer_->pieces()) most = std::max(most, piece.shard_bytes());
  return most;
}

void Unit::gather_listed(Prefetch where) {
  for (const auto& weak : prefetch_list(where))
    if (const std::shared_ptr<Unit> unit = weak.lock()) unit->gather();
}

void Unit::check_prefetch_lists(Root& root) const {
  if (!reshards_after_backward_ || keeps_open(false)) root.expect_open_units();
  for (const PrefetchList& list : prefetch_)
    for (const auto& weak : list) {
      const std::shared_ptr<Unit> unit = weak.lock();
      root.expect_open_units();
      TESSERA_EXPECT(unit != nullptr, "prefetch: a unit in a list of unit '", shards_.name(),
                     "' is gone, or was made again by fully_shard; set the list again");
      TESSERA_EXPECT(unit->root().get() == &root, "prefetch: unit '", unit->name(),
                     "' is in a list of unit '", shards_.name(),
                     "' and has another root; list units under one root");
    }
}

// --- gradients that a backward was told not to reduce yet ---

void Unit::set_unreduced(bool is_unreduced) {
  keeps_ = is_unreduced;
  const auto first = static_cast<std::size_t>(shards_.first_trainable());
  shards_.group()->set_unreduced(first, first + shards_.parameter_of().size(), is_unreduced);
  if (!is_unreduced || shards_.group()->is_laid_out) return;
  for (std::size_t i = first; i < first + shards_.parameter_of().size();
       ++i)  // frozen since forward
    if (const auto p = shards_.group()->trained(i).parameter.lock(); p && !p->trainable)
      drop_unreduced(static_cast<int>(i));
}

void Unit::bring_in_kept() {
  if (!keeps_) return;
  ReductionPolicy& now = shards_.reductions();
  const struct Decided {
    ReductionPolicy& policy;
    bool reduces, all_reduces;
    ~Decided() {
      policy.reduces = reduces;
      policy.all_reduces = all_reduces;
    }
  } decided{now, now.reduces, now.all_reduces};
  now.reduces = now.all_reduces = true;
  reduce();
}

void Unit::drop_kept() noexcept {
  if (!buffer_) return;
  set_unreduced(false);
  buffer_->drop_kept();
}

void Unit::drop_unreduced(int i) {
  const auto at = static_cast<std::size_t>(i);
  if (!buffer_ || shards_.group()->unreduced.empty() || !shards_.group()->unreduced[at]) return;
  shards_.group()->set_unreduced(at, at + 1, false);
  buffer_->drop_kept(i);
  if (!shards_.group()->unreduced.empty()) return;
  buffer_->drop_kept();
  keeps_ = false;
}

// --- after a failure ---

void Unit::abandon_call() noexcept {
  if (!calls_.end_call()) return;
  // Of a recomputed function that runs again the pass ends it, which fails or goes on: operations
  // that the function holds back may read what is open.
  if (calls_.entered() == 0) abandon_round();
  if (root_ && root_->end_call()) root_->abandon_rounds();
}

void Unit::abandon_round() noexcept {
  calls_.end_round();
  parameters_.close_unchecked();
}

void Unit::abandon_backward() noexcept {
  const bool was_touched = is_given_ || (root_ && reduced_in_ == root_->backward().pass());
  if (shards_.group() && was_touched) shards_.group()->drop_gradient();
  if (was_touched) drop_kept();
  if (local_) local_->abandon();
  calls_.abandon_backward();
  trains_ = is_given_ = may_be_used_ = false;
  parameters_.close_unchecked();
  parameters_.drop_part();
  if (buffer_) buffer_->give_back();
}

void Unit::reset() noexcept {
  abandon_round();
  abandon_backward();
  if (shards_.group()) shards_.group()->drop_gradient();
  drop_kept();
  forwards_.clear();
}

void Unit::leave_root() noexcept {
  set_slots(nullptr, nullptr, nullptr, nullptr);
  root_ = nullptr;
}

void Unit::expect_no_recovery_since(std::uint64_t recovery_count) const {
  TESSERA_EXPECT(root_ && recovery_count == root_->device().recoveries(),
                 "backward: the graph of unit '", name(),
                 "' belongs to a step that failed and was reset, or was made before parameters "
                 "were frozen or thawed; run forward again");
}

}  // namespace tessera::shard
