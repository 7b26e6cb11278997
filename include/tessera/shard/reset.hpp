// Going on in the same process after a step that failed.
#pragma once

#include <string>
#include <string_view>

#include "tessera/nn/module.hpp"

namespace tessera {

// What `reset` found, the same on every rank.
struct ShardReset {
  std::string cause;  // why the step failed: the first rank that did, and what it threw
  // Every rank has the parameters and optimizer state of the same update; Optimizer::steps() says
  // of which. False when the step failed during the update, or before another write to them had run
  // (Parameter::edit, a load); when it was the first behind freezing a parameter, so that some
  // ranks may have dropped its moments; over NCCL also when a GPU had an update in flight, which it
  // has perhaps made. The program then has to load them. Until it has, a step is a ContractError on
  // every rank.
  bool parameters_are_consistent = true;
};
// Makes the next step possible after one that failed, on any rank and anywhere in the step. Every
// rank calls it, outside of the modules, once it has caught what the step threw there. This is the
// rank's own exception, or the CommError that a peer's became.
//
//   for (bool is_done = false; !is_done;) {
//     try {
//       while (optimizer.steps() < steps) step(batches[optimizer.steps()]);
//       world.barrier();          // no rank leaves while a peer may still fail
//       is_done = true;
//     } catch (const ContractError&) {
//       throw;                    // of this rank's program: it would come again
//     } catch (const std::exception&) {
//       const ShardReset done = reset(model);
//       log(LogLevel::warning, done.cause);
//       if (!done.parameters_are_consistent) load(checkpoint);
//     }
//   }
//
// The loop asks the optimizer which step is next. A rank that is behind hears of a failure in its
// peers' step k while it is still in step k - 1. So an update that has not begun is taken back on
// every rank. An update that all ranks have made runs to its end, whatever fails in the step after
// it. Other work that the program has queued may not have run. So make batches, and state dicts on
// the device, anew.
//
// `tree` is the root, or a module around all roots of the world. A root that is left out must be
// reset and loaded before it is used again. On every rank this calls World::recover with `cause`
// and closes all units below `tree`. It drops all their gradients, also those of earlier
// micro-batches. It keeps parameters, optimizer state, and what each rank has frozen or decided
// (shard/runtime_control.hpp). A step that makes such decisions makes them again, since some ranks
// may have failed before they came to them. Where ranks then differ, the next step says so on all.
// The number of random draws becomes the largest of all ranks. To repeat a step with dropout bit by
// bit, put back autograd::random_state() from before it.
//   Throws: ContractError for a module that holds no root, or a part of one, or units of several
// worlds, and inside of a call; CommError as World::recover.
ShardReset reset(nn::Module& tree, std::string_view cause = {});

}  // namespace tessera
