// What happens to units in backward: in which order they are entered and left, which gathers run
// ahead, and the end of a pass.
//
// Note [One order on every rank]
// All ranks call the same units in the same order in forward, and backward goes back along these
// calls (autograd/node.hpp, Region): it enters and leaves them in mirrored order, and to enter one
// is to gather, to leave it to reduce. So all ranks issue the same collectives in the same order,
// whatever their graphs have reached. A branch that one rank does not use, prefetch depth 1:
//
//   forward, both    root( a( ) b( ) )          rank 1: loss = f(x), b's result is not in it
//
//   rank 0                                      rank 1
//   node of the loss is due  enter root         the same
//                            gather b
//   nodes of b are due       enter b, gather a  node of f is due: all steps before it
//   nodes of f are due       leave b, reduce b    enter b, gather a, leave b, reduce b (zeros)
//   nodes of a are due       enter a            nodes of a are due: enter a
//   the pass ends            leave a, reduce a  the same
//                            leave root
//
// Which forwards a pass goes back along is the program's: those that it reaches, and those whose
// graphs are gone. A rank that leaves one out while its graph is there says skip_backward.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/device/event.hpp"

namespace tessera::shard {

class Root;
class Unit;
struct BackwardNeeds;

class BackwardOrder {
 public:
  // `root` has this.
  explicit BackwardOrder(Root& root) : root_(root) {}
  BackwardOrder(const BackwardOrder&) = delete;
  BackwardOrder& operator=(const BackwardOrder&) = delete;

  // A call of the unit: it is open on return, if its parameters are needed, and the gathers of
  // those that backward enters next are queued.
  void enter(Unit& unit, const BackwardNeeds& needs);
  // Reduces what its calls may have given and closes the unit, unless it is entered by a call
  // around this one, or others of the same round come.
  void leave(Unit& unit, const BackwardNeeds& needs);
  // The way back along a forward of the root is over, or the pass, of number 0: reduces what is
  // owed, of what other roots have kept too, and closes the units that were left open.
  void end_of_forward(std::uint64_t forward);
  // The root's call begins a forward. Returns the number at which it does for backward: before what
  // the program has opened for it by hand, and used; 0: now.
  std::uint64_t begin_recorded();
  // A unit was opened outside of calls, and may be used from here on.
  void note_opened();
  // After each reduce-scatter, which has ended when `event` has.
  void on_reduced(const Event& event) { reduced_ = event; }

  // --- the pass ---
  // Asks for end_of_forward at the end of the running pass.
  void schedule_end();
  // The number of the backward pass that runs or ran last.
  std::uint64_t pass() const noexcept { return pass_; }
  // After a pass that failed: closes everything, and drops the gradients that it had touched.
  void abandon_pass() noexcept;
  // After a step that failed.
  void reset() noexcept {
    abandon_pass();
    opened_at_ = 0;
  }

 private:
  void prefetch(Unit& unit, int depth);
  bool call_ends_next() const;

  // Held by the running pass. When it goes and its end has not come, the pass has failed.
  struct Pass {
    std::shared_ptr<Root> root;
    BackwardOrder& order;
    ~Pass() {
      if (order.in_pass_) order.abandon_pass();
    }
  };

  Root& root_;
  std::uint64_t opened_at_ = 0;  // when the first unit was since the root's last forward; 0: none,
  std::uint64_t opened_after_ = 0;  // and how many forwards there were
  std::vector<Unit*> entered_;      // from the outermost
  std::uint64_t pass_ = 0;
  bool in_pass_ = false;
  Event reduced_;  // of the last reduction
};

}  // namespace tessera::shard
