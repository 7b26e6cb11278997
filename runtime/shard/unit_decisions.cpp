// What a program decides about a unit while it runs; see shard/runtime_control.hpp.
#include <utility>

#include "runtime/shard/unit.hpp"

namespace tessera::shard {

// --- how long it stays open ---

void Unit::set_reshard_after_forward(Reshard when) {
  if (shards_.options().reshard_after_forward == when) return;
  shards_.set_reshard_after_forward(when);
  name_decisions();
  if (shards_.slots()) shards_.slots()->set_keeps_open(shards_.number(), keeps_open());
}

void Unit::set_reshard_after_backward(bool reshards) {
  reshards_after_backward_ = reshards;
  name_decisions();
}

void Unit::set_unshard_in_backward(bool unshards) {
  is_read_ = unshards;
  name_decisions();
}

// --- which gathers run ahead ---

void Unit::set_prefetch(Prefetch where, PrefetchList units) {
  prefetch_[static_cast<std::size_t>(where)] = std::move(units);
  name_decisions();
}

// --- what its reductions do ---

void Unit::set_reduces(bool reduces) {
  shards_.reductions().reduces = shards_.reductions().all_reduces = reduces;
  name_decisions();
}

void Unit::set_all_reduces(bool all_reduces) {
  shards_.reductions().all_reduces = all_reduces;
  name_decisions();
}

void Unit::set_divide_factor(double factor) {
  shards_.reductions().divide_factor = factor;
  name_decisions();
}

void Unit::set_reductions_in_flight(int reductions) {
  shards_.set_reductions_in_flight(reductions);
  if (shards_.slots()) shards_.slots()->set_reductions_in_flight(shards_.number(), reductions);
}

void Unit::set_all_reduce_hook(AllReduceHook hook, std::optional<StreamId> stream) {
  shards_.reductions().hook = std::move(hook);
  shards_.reductions().hook_stream = stream;
  if (buffer_) buffer_->set_hook(!!shards_.reductions().hook);
  shards_.name_collectives();
}

// --- what peers are told ---

void Unit::name_decisions() {
  std::string said;
  const auto say = [&](const std::string& what) { said += (said.empty() ? "" : ", ") + what; };
  if (const Reshard now = shards_.options().reshard_after_forward; now != reshard_)
    say("reshard " + now.to_string());
  if (!reshards_after_backward_) say("open after backward");
  if (is_read_ != may_be_read_) say(is_read_ ? "read in backward" : "not read in backward");
  if (shards_.reductions().divide_factor != shards_.ranks())
    say(concat("gradients divided by ", shards_.reductions().divide_factor));
  if (!shards_.reductions().reduces)
    say("set_requires_gradient_sync(false)");
  else if (!shards_.reductions().all_reduces)
    say("set_requires_all_reduce(false)");
  for (const bool is_forward : {true, false}) {
    std::string list;
    for (const auto& weak : prefetch_list(is_forward ? Prefetch::forward : Prefetch::backward))
      if (const std::shared_ptr<Unit> unit = weak.lock()) list += ' ' + unit->name();
    if (!list.empty()) say((is_forward ? "prefetches" : "prefetches in backward") + list);
  }
  if (!said.empty()) said = " (" + said + ')';
  shards_.set_decisions(said);
}

}  // namespace tessera::shard
