// The dice of random programs, and the parts that are drawn with them.
#pragma once

#include "tests/promises/random_program.hpp"
#include "tests/support/dice.hpp"

namespace tessera::testing {

class ProgramDice : public Dice {
 public:
  using Dice::Dice;
  // A set of ranks: most often all.
  Ranks ranks() { return once_in(3) ? static_cast<Ranks>(below(1 << kMostRanks)) : kAllRanks; }
  Reshard reshard() {
    return of({Reshard::automatic, Reshard::always, Reshard::never, Reshard::to(2)});
  }
};

// f(part) of `part` and all below, in the order in which they are counted.
template <class Part, class F>
void for_each_part(Part& part, const F& f) {
  f(part);
  for (auto& child : part.children) for_each_part(child, f);
}

PartPlan make_root(ProgramDice& dice, Offload offload);
// In which dtype units give their outputs, in a quarter of the programs.
void vary_outputs(ProgramDice& dice, PartPlan& root);
// What parts are called with, in a third of the programs, and what calls change, in a quarter.
void vary_inputs(ProgramDice& dice, PartPlan& root);
void add_buffers(ProgramDice& dice, PartPlan& root);
// Losses inside of the root's calls, in a quarter of the programs. Returns whether there are any.
bool add_losses(ProgramDice& dice, PartPlan& root);
// The same of losses apart from what comes before, in a sixth.
bool add_losses_apart(ProgramDice& dice, PartPlan& root);
// Recomputed functions that capture what others get as an input.
void vary_captures(ProgramDice& dice, PartPlan& root);

}  // namespace tessera::testing
