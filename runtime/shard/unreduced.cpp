// Gradients that a unit keeps from pass to pass, because a backward was told not to reduce them
// yet.
#include "runtime/shard/unit.hpp"

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

}  // namespace tessera::shard
