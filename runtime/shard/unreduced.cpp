// Gradients that a unit keeps from pass to pass, because a backward was told not to reduce them
// yet, or not over the replicas.
#include <utility>

#include "runtime/shard/unit.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::shard {

void Unit::set_unreduced(bool is_unreduced) {
  const auto first = static_cast<std::size_t>(shards_.first_trainable);
  shards_.group->set_unreduced(first, first + shards_.parameter_of.size(), is_unreduced);
}

void Unit::drop_kept() noexcept {
  if (!buffer_) return;
  set_unreduced(false);
  buffer_->drop_kept();
}

void Unit::drop_unreduced(int i) {
  if (!buffer_ || !shards_.group->unreduced[static_cast<std::size_t>(i)]) return;
  const auto at = static_cast<std::size_t>(i);
  shards_.group->set_unreduced(at, at + 1, false);
  buffer_->drop_kept(i);
  if (shards_.group->unreduced.empty()) buffer_->drop_kept();
}

void GradientBuffer::drop_kept() noexcept {
  for (GradientPiece& piece : pieces_) piece.drop_kept();
}

// --- a piece ---

// The reduce-scatter's sums, added to what is kept of earlier ones.
void GradientPiece::keep_terms() {
  const Stream reduce = shards_.device.reduce();
  ++backwards_;
  const bool is_first = !terms_.defined();
  const Tensor terms = staging(reduce.id(), is_first ? "postponed sums" : "staging");
  scatter(parts_of(terms));
  if (is_first)
    terms_ = terms;
  else
    accumulate(reduce, terms_, terms, false);
}

void GradientPiece::drop_kept() noexcept {
  for (Tensor& held : held_) held = {};
  terms_ = {};
  backwards_ = 0;
}

// The terms are reduced on their own stream, before and after.
void GradientPiece::drop_kept(std::size_t at) {
  const std::size_t i = at - layout_.first;
  held_[i] = {};
  if (!terms_.defined()) return;
  shards_.device.compute().wait(shards_.device.reduce().record());
  const Parts parts = parts_of(terms_);
  const std::int64_t chunk = shards_.parameters[parameter(i)]->spec.chunk_numel(),
                     begin = shards_.gradient_offset_of(parameter(i)) - range_.begin;
  raw::fill(values_of(parts).view({chunk}, {1}, begin), 0);
  raw::fill(counts_of(parts).view({1}, {1}, static_cast<std::int64_t>(i)), 0);
}

// Ranks that have kept or postponed differently are told so by the name. Only so, where units are
// open and nothing is gathered: else one's reduction would meet its peer's of another micro-batch.
const char* GradientPiece::with_what_was_kept(const char* name) const {
  const std::vector<bool>& kept = shards_.group->unreduced;
  const std::size_t first = static_cast<std::size_t>(shards_.first_trainable) + layout_.first;
  if (first >= kept.size() || !kept[first]) return name;
  return shards_.device.context().intern(concat(name, " (with what was kept unreduced)"));
}

const char* GradientPiece::all_reduce_name() {
  const char* const name = with_what_was_kept(shards_.all_reduce_name);
  const int backwards = std::exchange(backwards_, 0) + 1;
  if (backwards == 1) return name;
  return shards_.device.context().intern(concat(name, " of ", backwards, " backwards"));
}

}  // namespace tessera::shard
