#include "runtime/shard/gradient_buffer.hpp"

#include <algorithm>
#include <utility>

#include "tessera/tensor/ops.hpp"

namespace tessera::shard {

GradientBuffer::GradientBuffer(const UnitShards& shards)
    : shards_(shards), whole_(shards.parameter_of.size()), early_(shards.parameter_of.size()) {
  for (const PieceLayout& piece : shards.layout.pieces) pieces_.emplace_back(shards, piece);
}

void GradientBuffer::take(bool in_turn) {
  if (taken_ > 0) return;  // entered by a call around this one
  in_turn_ = in_turn;
  whole_.clear();
  left_.clear();
  for (const PieceLayout& piece : shards_.layout.pieces) left_.push_back(piece.end - piece.first);
  do take_next();
  while (!in_turn && taken_ < pieces_.size());
}

void GradientBuffer::take_next() {
  GradientPiece& piece = pieces_[taken_];
  const PieceLayout& layout = shards_.layout.pieces[taken_++];
  piece.take();
  for (std::size_t at = layout.first; at < layout.end; ++at)
    if (early_[at].defined()) raw::copy_into(piece.sink(at).tensor, std::exchange(early_[at], {}));
}

autograd::GradientSink GradientBuffer::sink(int i) {
  if (taken_ == 0) return early_sink(at(i));  // outside of the unit's calls
  const std::size_t piece = piece_of(at(i));
  TESSERA_EXPECT(piece >= sent_, "backward: parameter '",
                 shards_.parameters[shards_.parameter_of[at(i)]]->name,
                 "' gets a gradient from an operation that did not name it as an input; the others "
                 "have been reduced");
  return piece < taken_ ? pieces_[piece].sink(at(i)) : early_sink(at(i));
}

autograd::GradientSink GradientBuffer::early_sink(std::size_t at) {
  const bool is_there = early_[at].defined();
  if (!is_there) {
    const OwnerGuard owner(shards_.device, "gradients");
    early_[at] = Tensor::empty(shards_.parameters[shards_.parameter_of[at]]->shape,
                               shards_.reduce_dtype(), shards_.device);
  }
  return {early_[at], 1.0 / shards_.ranks(), is_there};
}

bool GradientBuffer::on_last_use(int i) {
  if (!in_turn_ || whole_.add(at(i))) return false;
  --left_[piece_of(at(i))];
  const std::size_t before = sent_;
  while (sent_ < pieces_.size() && left_[sent_] == 0) send();
  return sent_ > before;
}

void GradientBuffer::send() {
  pieces_[sent_].reduce();
  if (++sent_ == taken_ && taken_ < pieces_.size()) take_next();
}

void GradientBuffer::reduce() {
  if (taken_ == 0) take(false);
  while (sent_ < pieces_.size()) send();
  forget_pass();
}

std::int64_t GradientBuffer::most_shard_bytes() const noexcept {
  std::int64_t most = 0;
  for (const GradientPiece& piece : pieces_) most = std::max(most, piece.shard_bytes());
  return most;
}

void GradientBuffer::drop() noexcept {
  for (GradientPiece& piece : pieces_) piece.drop();
  forget_pass();
}

void GradientBuffer::forget_pass() noexcept {
  sent_ = taken_ = 0;
  in_turn_ = false;
  for (Tensor& early : early_) early = {};
}

std::size_t GradientBuffer::piece_of(std::size_t at) const {
  std::size_t piece = 0;
  while (at < shards_.layout.pieces[piece].first) ++piece;
  return piece;
}

}  // namespace tessera::shard
