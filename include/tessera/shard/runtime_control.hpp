// What a program may change of its units between steps; PyTorch: the setters of FSDPModule.
//
// Every rank makes the same calls at the same point of its program. They issue nothing, and hold
// until they are changed.
#pragma once

#include "tessera/nn/module.hpp"

namespace tessera {

// --- Gradients ---
//
// Micro-batches that are reduced once, three ways:
//
//                                        a micro-batch     the last one
//   as it is                             rs, ar            rs, ar           sharded gradients add
//   up set_requires_all_reduce(.., false)   rs                rs, ar           hybrid meshes
//   set_requires_gradient_sync(.., false)                  rs, ar           full gradients add up
//
//   for (int micro = 0; micro < 8; ++micro) {
//     set_requires_gradient_sync(model, micro == 7);
//     (model.loss(tokens[micro], targets[micro]) / 8).backward();
//   }
//   optimizer.step();

// Whether backward reduces the gradients of the unit `module`, and with `recurse` of those below
// it, from here on. While false they add up on each rank, unreduced, in MixedPrecision::reduce, and
// the next backward with true that comes along a call of the unit reduces the sum. They are full
// gradients: ShardPlan::Unit::unsharded_gradient_bytes of them stay in memory. true makes
// set_requires_all_reduce true, too. No effect on one rank, where there is nothing to reduce, and
// on what is streamed: slices of a table are reduced by each backward.
//   In between the optimizer's step, clip_grad_norm, GradScaler::unscale and
//   Parameter::set_trainable
// throw ContractError naming the unit; zero_grad drops what is kept of its parameters, reset all.
// Parameter::grad has what was reduced.
// Throws: ContractError where there is no such unit, within a call of one and within backward.
// Where ranks differ, the step fails on all of them with a CommError.
void set_requires_gradient_sync(nn::Module& module, bool requires_gradient_sync,
                                bool recurse = true);

// Whether backward sums these gradients over the replicas of a hybrid mesh, once it has summed them
// over the ranks that shard. While false a rank keeps those sums of its shards, in
// MixedPrecision::reduce, and the next backward with true adds them to its own: so many bytes as
// ShardPlan::Unit::postponed_sum_bytes says. Otherwise as set_requires_gradient_sync. No effect
// where nothing replicates.
void set_requires_all_reduce(nn::Module& module, bool requires_all_reduce, bool recurse = true);

// By how much the gradients of the unit `module` alone are divided, on their way from backward on:
// else it is the number of ranks, replicas included, so that they become the mean. A sum over the
// ranks is 1. What is kept unreduced was divided when it was written. It counts for one rank, too.
// Throws: ContractError unless `factor` is finite and above 0, and as set_requires_gradient_sync.
void set_gradient_divide_factor(nn::Module& module, double factor);

}  // namespace tessera
