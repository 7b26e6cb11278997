// Collectives on tensors, in one call each (PyTorch: torch.distributed):
//
//   Tensor total = dist::all_reduce(loss.detach(), world);          // of all ranks
//   Tensor largest = dist::all_reduce(norms, *mesh_row, ReduceOp::max);
//   Tensor logits = dist::all_gather(mine, world);                  // [B, V] of each: [size B, V]
//   Tensor h = dist::send_recv(y, stage, stage + 1, pipeline);      // defined on stage + 1 alone
//   Tensor loss = model.loss(x, y, {.count = dist::count_targets(y, world)});
//
// Every rank of the group calls, in the same order, with the same shape and dtype. Ranks that do
// not get a CommError that names both. Nothing blocks: the work is queued on the compute stream,
// among the work of other tensors there.
//
//   compute   ── makes x ── copy to workspace ── record ┐             ┌ wait ── reads the result
//   control   (compute, unless GroupStreams say so)     └ wait ── pieces ── record
//
// The input has any layout and any dtype, and is never changed. The result is a new contiguous
// tensor without history. Peers read symmetric memory only, so each call copies its input there, in
// pieces of RankGroup::kWorkspaceBytes. The sharding engine gathers where bytes lie, and does not
// use these.
// Throws: ContractError for tensors of another device than the group's, or on meta if their values
// are read; for sizes that do not divide; for a root or target that is no rank; for tensors that
// require a gradient.
#pragma once

#include "tessera/autograd/losses.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/comm/group.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::dist {

// The sum, or the largest, over all ranks, on every rank: x [...] -> the same shape. 16-bit types
// are summed in f32. Sums are taken in rank order, unless RankGroup::sums_are_ordered says
// otherwise.
Tensor all_reduce(const Tensor& x, const RankGroup& group, ReduceOp op = ReduceOp::sum,
                  Caller at = Caller::current());

// How many of all ranks' targets are not kIgnoredTarget: `count` of LossOrder, for losses that are
// means over them. The group has the ranks that average their gradients. For a step of several
// micro-batches give the targets of all of them, and add their losses up. targets: [...] of i32 or
// i64; each rank may have another shape.
TargetCount count_targets(const Tensor& targets, const RankGroup& group,
                          Caller at = Caller::current());

// All ranks' tensors one behind the other along dimension 0, in rank order.
// x: [n, ...] or [], returns [size n, ...] or [size].
Tensor all_gather(const Tensor& x, const RankGroup& group, Caller at = Caller::current());

// Rank r gets the r-th part along dimension 0 of the sum, or of the largest, over all ranks.
// x: [size n, ...], returns [n, ...].
Tensor reduce_scatter(const Tensor& x, const RankGroup& group, ReduceOp op = ReduceOp::sum,
                      Caller at = Caller::current());

// The tensor of rank `root` of the group, on every rank. Only shape and dtype of the others'
// tensors count, so these may be on meta.
Tensor broadcast(const Tensor& x, int root, const RankGroup& group, Caller at = Caller::current());

// Part r of x along dimension 0 goes to rank r; part r of the result came from there.
// x: [size n, ...], returns the same shape.
Tensor all_to_all(const Tensor& x, const RankGroup& group, Caller at = Caller::current());

// The tensor of rank `root`, on rank `target`. All others get an undefined tensor, which takes no
// memory, and whose use is an error. Only shape and dtype of tensors that are not the root's count,
// as for a broadcast. A rank that sends to itself gets a copy, so a ring may have one rank.
//
// PyTorch: `send` on the one, `recv` on the other, nothing on the rest. Here every rank of the
// group calls. So a mismatch is an error that names both ranks, not a wait. Ranks between which
// nothing travels enter and leave, too. So two ranks that pass much to each other are best a group.
Tensor send_recv(const Tensor& x, int root, int target, const RankGroup& group,
                 Caller at = Caller::current());

}  // namespace tessera::dist
