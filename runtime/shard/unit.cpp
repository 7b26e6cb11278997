#include "runtime/shard/unit.hpp"

#include <utility>

namespace tessera::shard {

void Unit::materialize(const Device& device) {
  shards_.materialize(device);
  if (shards_.group && !shards_.has_buffer())
    local_ = std::make_shared<LocalGradient>(shards_.group);
  parameters_.materialize();
  make_buffer();
}

void Unit::lay_out() {
  if (!shards_.group || shards_.group->is_laid_out) return;
  close();
  shards_.lay_out();
  make_buffer();
}

void Unit::make_buffer() {
  for (const auto& p : shards_.parameters) p->sinks = {std::shared_ptr<void>(), this};  // owns none
  buffer_ = nullptr;
  if (!shards_.parameter_of.empty() && shards_.has_buffer())
    buffer_ = std::make_unique<GradientBuffer>(shards_);
}

// A handle, a graph or an optimizer that outlives the unit keeps no slice, whose unit would keep
// the slots, writes no gradient, and an error finds a name.
Unit::~Unit() {
  drop_kept();
  static const std::string gone = "(gone)";
  for (const auto& part : {shards_.parameters, shards_.streamed})
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
  if (!context_)
    Context::build(module);
  else if (shards_.is_root() && is_outermost)
    context_->follow_masks(module);
  begin_call(control_.is_read_in_backward());
  if (calls_.is_list() && is_outermost && calls_.entered() == 0 && !calls_.is_in_round()) {
    calls_.begin_round();
    context_->begin_round(shards_.number);
  }
}

void Unit::begin_call(bool is_read) {
  context_->expect_valid(name());
  if (calls_.is_running()) {
    if (autograd::runs_again() && !autograd::in_backward()) calls_.record_call_again();
    return calls_.begin_call();
  }
  if (calls_.entered() > 0) {  // open: a recomputed function runs again
    TESSERA_EXPECT(parameters_.version() == calls_.version(), "backward: unit '", name(),
                   "' had its parameters updated after the forward that is recomputed; go backward "
                   "first");
  } else {
    if (is_forward()) context_->begin_forward(forwards_, shards_.is_root());
    if (is_stale() && !autograd::in_backward()) close();
    gather();
    open();
    if (!autograd::in_backward() && !calls_.is_in_round())
      gather_listed(UnitControl::Prefetch::forward);
  }
  const bool trains = autograd::history_is_wanted(), runs_again = autograd::runs_again();
  if (trains && !autograd::in_backward()) shards_.expect_gradients();
  if ((trains || runs_again) && !autograd::in_backward())
    calls_.record_call(shared_from_this(), {.gradients = trains,
                                            .parameters = runs_again || is_read,
                                            .version = parameters_.version()});
  context_->begin_call();
  calls_.begin_call();
}

void Unit::after_call(nn::Module& module) {
  if (calls_.is_in_round() && calls_.entered() == 0) calls_.note_run(module);
  end_call();
}

void Unit::end_call() {
  if (!calls_.end_call()) return;
  const bool is_outermost = context_->end_call();
  if (is_forward()) forwards_.push_back(shards_.device.compute().record());
  // In backward its part of that ends it.
  if (calls_.entered() == 0 && !calls_.is_in_round()) end_round();
  if (is_outermost) context_->end_rounds();
}

void Unit::end_round() {
  const UnitCalls::Round round = calls_.end_round();
  if (control_.keeps_open() && round.is_recorded) return;
  if (round.is_read) parameters_.keep_part();
  parameters_.close(round.is_recorded && control_.may_stay());
}

autograd::GradientSink Unit::sink(int i) {
  TESSERA_EXPECT(context_ != nullptr, "backward: a parameter of unit '", name(),
                 "' was sharded since the forward that used it; go backward before");
  context_->schedule_end();
  owes_reduction_ = true;
  return local_ ? local_->sink(i, 1 / shards_.divide_factor) : buffer_->sink(i);
}

void Unit::on_last_contribution(int i) {
  if (!buffer_ || !buffer_->on_last_contribution(i)) return;
  reduced_in_ = context_->pass();
  context_->on_reduced(shards_.group->reduced);
}

// --- the steps ---

void Unit::gather() {
  if (parameters_.gather(context_->name_of_gather(shards_))) context_->count_gather();
}

void Unit::reduce() {
  waits_ = is_postponed() && (may_be_used_ || waits_);
  owes_reduction_ = trains_ = may_be_used_ = false;
  reduced_in_ = context_->pass();
  if (local_) local_->complete();
  if (!buffer_) return;
  if (shards_.reduces) buffer_->reduce();
  set_unreduced(is_postponed());
  if (!shards_.reduces) return;
  context_->on_reduced(shards_.group->reduced);
  if (shards_.ranks() > 1) context_->count_reduction(shards_.replicas && !is_postponed());
}

// --- its root ---

void Unit::join_root(std::shared_ptr<Context> context, std::string name, int number) {
  context_ = std::move(context);
  shards_.root = context_->number();
  shards_.set_name(std::move(name));
  shards_.number = number;
}

}  // namespace tessera::shard
