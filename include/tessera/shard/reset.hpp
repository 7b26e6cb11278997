// After a step that failed: the same process goes on.
#pragma once

#include <string>
#include <string_view>

#include "tessera/nn/module.hpp"

namespace tessera {

// What `reset` found, the same on every rank.
struct ShardReset {
  std::string cause;  // why the step failed: the first rank that did, and what it threw
  // Every rank has the parameters and optimizer state of the same update; Optimizer::steps() says
  // which. False when the step failed while they were updated, or before what was written to them
  // otherwise had run (Parameter::edit, a load): then they are to be loaded, and a step before that
  // is a ContractError on every rank.
  bool parameters_are_consistent = true;
};
// After a step that failed, on any rank and anywhere in it: makes the next one possible, in this
// process. Every rank calls it, outside of the modules, once it has caught what the step threw
// there: its own exception, or the CommError that a peer's became.
//
//   for (bool is_done = false; !is_done;) {
//     try {
//       while (optimizer.steps() < steps) step(batches[optimizer.steps()]);
//       world.barrier();          // no rank leaves while a peer may still fail
//       is_done = true;
//     } catch (const std::exception&) {
//       if (!reset(model).parameters_are_consistent) load(checkpoint);
//     }
//   }
//
// The loop asks the optimizer which step is next: a rank that is behind hears of a failure in its
// peers' step k while it still is in step k - 1, and an update that has not begun is taken back on
// every rank. What else the program has queued and not waited for may not have run: batches, and
// state dicts on the device, are made anew, or read by the host before.
//
// Does World::recover with `cause`, on every rank of the world, closes all units below `tree`, and
// drops all their gradients, those of earlier micro-batches too: the step is discarded whole. Kept
// are parameters and optimizer state as they are, and what each rank has frozen or decided
// (shard/runtime_control.hpp). A step that does so says it anew when it is made again, since some
// ranks may have failed before they came to it; where they differ, the next step says so on every
// rank. `tree` is the root, or where a world has several, a module around all of them: one that is
// left out must be reset and loaded before it is used again. The number of random draws becomes the
// largest of all ranks; to repeat a step with dropout bit by bit, put back autograd::random_state()
// from before it. Throws: ContractError for a module that holds no root, or a part of one, or units
// of several worlds, and inside of a call; CommError as World::recover.
ShardReset reset(nn::Module& tree, std::string_view cause = {});

}  // namespace tessera
