// What a program decides about its units while it runs: when they are gathered, for how long they
// stay open, and which backwards reduce (PyTorch: the methods of FSDPModule).
//
// Every rank makes the same of these calls, at the same point among its calls of the model, because
// gathers are collectives. Where a rank has decided otherwise, the unit's next gather fails
// on every rank. The CommError names the unit and the decision. Where ranks decided differently
// before the root's first call, that call throws a ContractError. A unit that stays open gathers
// nothing, so the error comes with the next collective that differs between ranks. Replicas share
// no gathers, so the error comes with their next all-reduce, or as a timeout.
//
// Other methods of a module become calls of its unit by nn::Module::call, without registration
// (PyTorch: register_fsdp_forward_method):
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

// Queues the gather of the unit's parameters and opens the unit. From then on Parameter::value
// gives full tensors, and calls of the unit gather nothing. The unit stays open until reshard,
// until the end of its next call that reshards, or until the end of backward. An update makes the
// full parameters stale; to use them before the next unshard is an error.
//   The host waits for nothing. A stream waits at the first use of a value, so work that is queued
// in between overlaps with the gather. There is no handle to wait for (PyTorch: UnshardHandle). A
// streamed parameter stays as it is: one slice is there at a time.
//   If gradients are enabled in this call, every rank later reduces the unit once, whether it has
// used the unit or not. The backward of the root's next forward makes this reduction. If no forward
// follows, the backward of the root's last forward makes it. If the unit is called again before
// that backward, its gradients may be reduced in several parts. All ranks must then use the unit
// alike. Otherwise each rank gets a CommError that says `unshard` behind the name of the reduction.
//   Throws: ContractError for a module that is no unit or has no memory; for a unit inside
// another one, if the root has not been called yet, or not since a failed step; inside backward and
// recomputed functions.
void unshard(nn::Module& module);
// Closes the unit, and slices of it that have stayed open. The next use gathers them again. It does
// nothing to a unit that is closed.
//   Throws: ContractError as unshard, inside of a call of the unit, and for a full tensor that
// somebody still holds.
void reshard(nn::Module& module);

// --- How long units stay open ---

// `recurse`: the setting holds for all units below the module, too.

// Sets ShardOptions::reshard_after_forward from here on. shard_plan counts gathers accordingly. The
// first steps after a change plan their slots anew. A setting that has run before has its plan
// already. With `never`, a phase of forwards without gradients, as an evaluation or a rollout,
// gathers once:
//
//   set_reshard_after_forward(model, Reshard::never);
//   { NoGradGuard no_gradient; for (...) model(x); }
//   set_reshard_after_forward(model, Reshard::automatic);
//
// A unit that is open when this is called stays open until its next call ends, or until reshard.
//   Throws: ContractError where there is no such unit; for a Reshard::to that fully_shard would
// refuse; and inside of calls and of backward.
void set_reshard_after_forward(nn::Module& module, Reshard when, bool recurse = true);
// Whether backward closes a unit when it is done with it; at first it does. A unit that stays open
// is gathered by the next forward only if it was updated in between. So the forwards of several
// micro-batches gather once. Throws: as set_reshard_after_forward.
void set_reshard_after_backward(nn::Module& module, bool reshards, bool recurse = true);
// Sets whether backward gathers this unit, for calls from here on. At first
// nn::Module::reads_parameters_in_backward decides. If it does not gather, and backward reads a
// parameter that is not there, that is a ContractError. A unit that a recomputed function calls is
// gathered all the same. For a streamed parameter its module decides at each use.
//   Throws: as set_reshard_after_forward. For a unit that has streamed parameters only,
// ContractError unless `unshards` is what the modules decide already.
void set_unshard_in_backward(nn::Module& module, bool unshards);

// --- Which gathers run ahead ---

// When the unit is called, the gathers of these units are queued behind its own, in this order. At
// first the list is empty. A list helps only where the host is not ahead of the device already.
//   Throws: as set_reshard_after_forward, and ContractError that names a module that is no unit
// under the same root.
void set_modules_to_forward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules);
// When backward enters the unit, the gathers of these units are queued. They stand in for the
// default, which is the `prefetch_depth` units that come next; an empty list brings it back. The
// root's list is queued before the root's own gather, which waits, on the device, for the slot that
// forward still uses. A listed unit that backward never enters is closed when backward ends.
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

// Whether backward reduces the gradients of the unit `module` from here on. While it is false, full
// gradients add up on each rank in MixedPrecision::reduce. They take
// ShardPlan::Unit::unsharded_gradient_bytes. Once it is true, the next backward reduces the sum.
// This may be a backward of another root on this device, even if that backward does not reach this
// unit. true makes set_requires_all_reduce true, too.
//   It has no effect on one rank. Slices of a streamed parameter are reduced by each backward,
// unless ShardOptions::slices_wait says otherwise.
//   While gradients wait, an optimizer's step, clip_grad_norm and GradScaler::unscale throw a
// ContractError that names the unit. Parameter::grad has what was reduced. zero_grad drops the
// waiting gradients of its parameters. Freezing a parameter drops its waiting gradient. reset drops
// all of them. Where something was frozen or thawed, the root's next call reduces the
// gradients that still wait.
//   Throws: ContractError where there is no such unit, within a call of one and within backward.
// Where ranks differ, the step fails on all of them with a CommError.
void set_requires_gradient_sync(nn::Module& module, bool requires_gradient_sync,
                                bool recurse = true);

// Whether backward sums gradients over the replicas of a hybrid mesh, after the sum over the ranks
// that shard. While it is false, a rank keeps the sums of its shards in MixedPrecision::reduce.
// They take ShardPlan::Unit::postponed_sum_bytes. The next backward with true adds them to its own.
// The rest is as of set_requires_gradient_sync. It has no effect on a mesh without replicas.
void set_requires_all_reduce(nn::Module& module, bool requires_all_reduce, bool recurse = true);

// Divides the gradients of the unit `module` alone by `factor`. At first the factor is the number
// of ranks, replicas included, which gives the mean; 1 gives the sum. Backward divides when it
// writes a gradient, so gradients that wait keep the factor they had. It counts on one rank, too.
// All ranks give the same factor. A gather or a reduction while factors differ is a CommError that
// names the factors.
//   Throws: ContractError unless `factor` is finite and above 0, and its inverse a normal f32; and
// as set_requires_gradient_sync.
void set_gradient_divide_factor(nn::Module& module, double factor);

// Sets ShardOptions::reductions_in_flight from here on. Ranks compare it before the next forward of
// the root, and all hear of a difference. That forward plans the slots anew. The arena moves to its
// new size as soon as no unit is open.
//   Throws: ContractError unless `reductions` is 1 to 64, and as set_requires_gradient_sync.
void set_reductions_in_flight(nn::Module& module, int reductions, bool recurse = true);

// The gradients of a piece or slice that a reduction has left on this rank.
struct ReducedGradient {
  // [n] in MixedPrecision::reduce: this rank's rows, already divided, one parameter behind the
  // other. Zeros between them have to stay zeros, since norms are taken over all.
  Tensor values;
  // [parameters] in the same dtype: how many ranks had a gradient. Optimizers skip what has 0.
  Tensor counts;
  Stream stream;  // where both may be read and written by what the hook queues
};
using AllReduceHook = std::function<void(const ReducedGradient&)>;

// Each reduction of the unit `module` alone calls `hook`. The call comes after the reduce-scatter
// and the sum over replicas. It comes before the result is added to the gradient so far. With it a
// program sums over further ranks. The hook is called on the host, in backward, in one order on all
// ranks. Dry runs call it, too, so that what it queues is planned and priced; it reads no values
// there.
//   It may queue anything on `ReducedGradient::stream`. That is the argument `stream` if one is
// given, and else the stream of the reduction. Collectives belong there, too; on another stream
// they need events between. The engine orders its own work around what the hook queues, and takes
// no memory for it. On `StreamId::compute` the operations of tensors and
// distributed/collectives.hpp work as they are, at the price of overlap. With another stream,
// compute must wait for `stream.record()` before these operations. Afterwards `stream` must wait
// for an event that compute records.
//
//   auto mesh = DeviceMesh::grid(world, {{"replicas", 2}, {"shards", 4}});
//   fully_shard(model, {.mesh = mesh["shards"]});
//   set_gradient_divide_factor(model, 8);
//   set_all_reduce_hook(model, [group = &mesh.group("replicas")](const ReducedGradient& g) {
//     for (const Tensor& x : {g.values, g.counts}) raw::copy_into(x, dist::all_reduce(x, *group));
//   }, StreamId::compute);
//
// On a stream other than compute, submit collectives to a communicator of the group. A sum in place
// has at most kStagedBytes (comm/communicator.hpp). A larger sum needs a send and a recv buffer in
// symmetric memory.
//   An empty hook removes it. What the hook throws comes out of backward.
//   Throws: ContractError for a stream that is given without a hook, for a stream of the host, and
// for a stream on a mesh with replicas, because the sums over replicas have one already.
// ContractError for a unit on one rank, where nothing is reduced, and as
// set_requires_gradient_sync. Backward throws a ContractError if the hook queues on compute without
// the two waits between compute and the hook's stream. Where only some ranks have a hook, the step
// fails on all of them with a CommError.
void set_all_reduce_hook(nn::Module& module, AllReduceHook hook,
                         std::optional<StreamId> stream = std::nullopt);

}  // namespace tessera
