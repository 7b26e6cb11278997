// The unreduced gradients of a unit on several ranks, in pieces that are filled and reduced one
// after the other, the parameters used last in forward first.
//
//   a unit that calls no other          a unit around others
//   enter   take 0                      enter   take all
//           sinks of 0                          calls of other units, sinks
//           reduce 0, take 1            leave   reduce all
//           sinks of 1 ..
//   leave   reduce the rest
//
// Between a unit's enter and leave nothing else of its own is issued, so all ranks take and reduce
// in one order, whatever their graphs reach. A piece goes as soon as this rank's graph has no more
// for it, and those before it have gone. What comes before its piece is taken waits in the pool: a
// rank's own graph takes no slot. Where a pass reduces nothing, no piece is taken, and what has
// come waits for the next that does. One rank has no buffer: its gradients go straight into the
// flat group (LocalGradient).
#pragma once

#include <deque>

#include "runtime/shard/gradient_piece.hpp"

namespace tessera::shard {

class GradientBuffer {
 public:
  // `shards` outlives this, has memory and something to train.
  explicit GradientBuffer(const UnitShards& shards);

  // As the unit is entered. `by_pieces`: nothing else comes between this and `reduce`.
  void take(bool by_pieces);
  // The sink of one more contribution to the gradient of the group's i-th trainable entry.
  // Throws: ContractError where on_last_contribution has said that there is none.
  autograd::GradientSink sink(int i);
  // All of that gradient is there. Returns whether a piece has waited for it alone; its reduction
  // has begun then.
  bool on_last_contribution(int i);
  // Reduces what is left, zeros for what has not arrived.
  void reduce();
  const std::deque<GradientPiece>& pieces() const noexcept { return pieces_; }
  // See ReduceStage.
  void set_replicas(Replicas* replicas);
  void set_hook(bool is_hooked);
  void set_symmetric(SymmetricGradients* gradients);
  // For a pass that failed: what has arrived in slots is lost.
  void give_back() noexcept;
  // Drops what is kept from pass to pass: all, or of the group's i-th trainable entry.
  void drop_kept() noexcept;
  void drop_kept(int i) { pieces_[piece_of(at(i))].drop_kept(at(i)); }

 private:
  std::size_t at(int i) const { return static_cast<std::size_t>(i - shards_.first_trainable()); }
  std::size_t piece_of(std::size_t at) const;
  void send();
  void forget_pass() noexcept;

  const UnitShards& shards_;
  std::deque<GradientPiece> pieces_;
  std::size_t sent_ = 0, taken_ = 0;  // how many
  bool goes_by_pieces_ = false;
  ArrivalMask complete_;           // gradients of which nothing more comes
  std::vector<std::size_t> left_;  // of each piece how many are not
};

}  // namespace tessera::shard
