#include "runtime/shard/gradient_buffer.hpp"

#include <algorithm>

namespace tessera::shard {

GradientBuffer::GradientBuffer(const UnitShards& shards)
    : shards_(shards), complete_(shards.parameter_of().size()) {
  for (const PieceLayout& piece : shards.layout().pieces) pieces_.emplace_back(shards, piece);
}

void GradientBuffer::take(bool by_pieces) {
  if (taken_ > 0) return;  // entered by a call around this one
  goes_by_pieces_ = by_pieces;
  complete_.clear();
  left_.clear();
  for (const PieceLayout& piece : shards_.layout().pieces) left_.push_back(piece.end - piece.first);
  do pieces_[taken_++].take();
  while (!by_pieces && taken_ < pieces_.size());
}

autograd::GradientSink GradientBuffer::sink(int i) {
  const std::size_t entry = at(i), piece = piece_of(entry);
  TESSERA_EXPECT(piece >= sent_, "backward: an operation adds to the gradient of parameter '",
                 shards_.parameters()[shards_.parameter_of()[entry]]->name,
                 "', which was already reduced; name the parameter as an input of the operation");
  return pieces_[piece].sink(entry);
}

bool GradientBuffer::on_last_contribution(int i) {
  const std::size_t entry = at(i);
  if (!goes_by_pieces_ || complete_.add(entry) || --left_[piece_of(entry)] > 0) return false;
  const std::size_t before = sent_;
  while (sent_ < pieces_.size() && left_[sent_] == 0) send();
  return sent_ > before;
}

void GradientBuffer::send() {
  pieces_[sent_].reduce();
  if (++sent_ == taken_ && taken_ < pieces_.size()) pieces_[taken_++].take();
}

void GradientBuffer::reduce() {
  if (taken_ == 0) take(false);
  while (sent_ < pieces_.size()) send();
  forget_pass();
}

void GradientBuffer::give_back() noexcept {
  for (GradientPiece& piece : pieces_) piece.give_back();
  forget_pass();
}

void GradientBuffer::forget_pass() noexcept {
  sent_ = taken_ = 0;
  goes_by_pieces_ = false;
}

// The first pieces have the last parameters. They are few, most often one.
std::size_t GradientBuffer::piece_of(std::size_t at) const {
  std::size_t piece = 0;
  while (at < shards_.layout().pieces[piece].first) ++piece;
  return piece;
}

void GradientBuffer::set_replicas(Replicas* replicas) {
  for (GradientPiece& piece : pieces_) piece.set_replicas(replicas);
}

void GradientBuffer::set_hook(bool is_hooked) {
  for (GradientPiece& piece : pieces_) piece.set_hook(is_hooked);
}

void GradientBuffer::set_symmetric(SymmetricGradients* gradients) {
  for (GradientPiece& piece : pieces_) piece.set_symmetric(gradients);
}

void GradientBuffer::drop_kept() noexcept {
  for (GradientPiece& piece : pieces_) piece.drop_kept();
}

}  // namespace tessera::shard
