// What a program decides about its units while it runs: when they are gathered, for how long, and
// which backwards reduce (PyTorch: the methods of FSDPModule). Every rank makes the same of these
// calls, at the same point among its calls of the model: gathers are collectives. Where one has
// decided otherwise, the unit's next gather is a CommError on every rank that names the unit and
// what was decided, or the root's first call a ContractError; where nothing is gathered, as of a
// unit that stays open, what differs then. Gathers are of the ranks that share shards: of replicas
// that have decided otherwise the next all-reduce tells, or the timeout where one makes none.
//
// To run further methods of a module as calls of its unit needs no registration (PyTorch:
// register_fsdp_forward_method): nn::Module::call is public, and what runs inside it is a call.
//
//   Tensor Model::encode(const Tensor& x) { return call([&] { return encoder(x); }); }
//   model.call([&] { return model.of_others(x); });            // of a class that can't be changed
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "tessera/shard/fully_shard.hpp"

namespace tessera {

// --- Outside of calls ---

// Queues the gather of the unit's parameters and opens it: Parameter::value gives full tensors, and
// calls of the unit gather nothing. Until reshard, the end of the unit's next call, where that
// reshards, or the end of backward. After an update of the parameters it is an error to use them
// before the next unshard. The host waits for nothing, and no stream before the first use of a
// value, so what is queued in between overlaps with the gather; there is no handle to wait for
// (PyTorch: UnshardHandle). Where gradients are enabled, the backward that comes reduces the unit
// once on all ranks, whichever of them have used it; where its gradients come in several parts, of
// its calls too or of several forwards, all ranks use it alike. A streamed parameter stays as it
// is: there one slice at a time. Throws: ContractError for a module that is no unit or has no
// memory, for one inside of another unit's module whose root has not run yet, and in backward,
// recomputed functions included.
void unshard(nn::Module& module);
// Closes the unit, and slices of it that have stayed open; what comes next gathers them again.
// Nothing, where it is closed.
// Throws: ContractError as unshard, inside of a call of the unit, and for a full tensor that
// somebody still holds.
void reshard(nn::Module& module);

// --- How long units stay open ---

// `recurse`: for all units below the module, too.

// ShardOptions::reshard_after_forward from here on, in shard_plan's counts of gathers, too. Slots
// are planned anew by the steps that follow, once for each way.
// Throws: ContractError for a module that is no unit, and inside of calls and of backward.
void set_reshard_after_forward(nn::Module& module, Reshard when, bool recurse = true);
// Whether backward closes a unit when its part has ended, as it does from the beginning. Where not,
// the next forward finds it open, and gathers it only where it was updated in between: so forwards
// of several micro-batches gather once. Throws: as set_reshard_after_forward.
void set_reshard_after_backward(nn::Module& module, bool reshards, bool recurse = true);
// Whether backward gathers this unit for calls made from here on; at first what
// nn::Module::reads_parameters_in_backward says. A unit that a recomputed function calls is
// gathered all the same, and of a streamed parameter its module says at each use. Where it is false
// and backward reads a parameter that is not there, that is a ContractError.
// Throws: as set_reshard_after_forward, and where all that the unit has is streamed, unless it says
// what its modules say.
void set_unshard_in_backward(nn::Module& module, bool unshards);

// --- Which gathers run ahead ---

// The units whose gathers are queued, in this order, behind the unit's own, when it is called; an
// empty list, as at first, is none. It matters where the host is not ahead of the device already.
// Throws: ContractError naming what is no unit under the same root, and as
// set_reshard_after_forward.
void set_modules_to_forward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules);
// The same when backward enters the unit, in the place of the default, the `prefetch_depth` units
// that come next; an empty list brings that back. Of the root they are queued before its own
// gather, which waits until forward has ended. What backward does not enter after all is closed
// when it ends.
void set_modules_to_backward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules);

// --- Gradients ---
//
// Micro-batches that are reduced once, three ways:
//
//                                          a micro-batch   the last one   what adds up
//   as it is                               rs, ar          rs, ar         gradients of shards
//   set_requires_all_reduce(.., false)     rs              rs, ar         sums of shards, hybrid
//   set_requires_gradient_sync(.., false)                  rs, ar         full gradients
//
//   rs: reduce-scatter over the ranks that shard    ar: all-reduce over replicas
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
// on what is streamed: slices of a table are reduced by each backward, unless
// ShardOptions::slices_wait says otherwise.
//   In between the optimizer's step, clip_grad_norm, GradScaler::unscale and set_trainable throw
// ContractError naming the unit; zero_grad drops what is kept of its parameters, reset all.
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
// All ranks say the same: a gather or reduction while they differ is a CommError that names them.
// Throws: ContractError unless `factor` is finite and above 0, and its inverse a normal f32; and as
// set_requires_gradient_sync.
void set_gradient_divide_factor(nn::Module& module, double factor);

// ShardOptions::reductions_in_flight from here on, on all ranks alike: they compare before the next
// forward of the root, and where one alone has called this, all hear of it. Slots are planned anew
// when that begins, and the arena moves to its new size as soon as no unit is open.
// Throws: ContractError unless `reductions` is 1 to 64, and as set_requires_gradient_sync.
void set_reductions_in_flight(nn::Module& module, int reductions, bool recurse = true);

// What a reduction has left on this rank of some of a unit's gradients, those of a piece or slice.
struct ReducedGradient {
  // [n] in MixedPrecision::reduce: this rank's rows, divided as they are, one parameter behind the
  // other. Zeros between them have to stay zeros, since norms are taken over all.
  Tensor values;
  // [parameters] in the same dtype: how many ranks had a gradient. Optimizers skip what has 0.
  Tensor counts;
  Stream stream;  // where both may be read and written by what the hook queues
};
using AllReduceHook = std::function<void(const ReducedGradient&)>;

// `hook` is called by each reduction of the unit `module` alone, behind the reduce-scatter and the
// sum over the replicas of a hybrid mesh, and before what was reduced is added to a gradient that
// is there: with it a program does its own sum over further ranks. It may queue anything on
// `ReducedGradient::stream`: that is where the reduction ran, or `stream`; collectives of a group
// whose communicator runs there, too, or on another stream with events between. It is called on
// the host, in backward, in one order on all ranks. The engine orders by events what the hook
// queues, and takes no memory for it. Dry runs call it, too, so that what it queues is planned and
// priced; it reads no values there. On `StreamId::compute` tensors' own operations and
// distributed/collectives.hpp may be used as they are, at the price of overlap; elsewhere compute
// waits for `stream.record()` before them, and `stream` for what compute records behind.
//
//   auto mesh = DeviceMesh::grid(world, {{"replicas", 2}, {"shards", 4}});
//   fully_shard(model, {.mesh = mesh["shards"]});
//   set_gradient_divide_factor(model, 8);
//   set_all_reduce_hook(model, [group = &mesh.group("replicas")](const ReducedGradient& g) {
//     for (const Tensor& x : {g.values, g.counts}) raw::copy_into(x, dist::all_reduce(x, *group));
//   }, StreamId::compute);
//
// Off compute a program submits to a communicator of the group itself: sums in place have
// kStagedBytes at most, larger ones a send and a recv in symmetric memory.
// An empty hook ends that. What the hook throws comes out of backward.
// Throws: ContractError for a stream without a hook, one where the mesh has replicas, whose sums
// have theirs, or one of the host; for a unit on one rank, where nothing is reduced; and as
// set_requires_gradient_sync. Backward throws one where operations that a hook has queued on
// compute have no such waits. Where some ranks have a hook and some none, the step fails on all of
// them with a CommError.
void set_all_reduce_hook(nn::Module& module, AllReduceHook hook,
                         std::optional<StreamId> stream = std::nullopt);

}  // namespace tessera
