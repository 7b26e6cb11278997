// fully_shard: per-parameter sharding with the semantics of PyTorch's FSDP2.
//
//   for (auto& block : model.blocks) fully_shard(block, {.mesh = mesh});
//   fully_shard(model, {.mesh = mesh});                       // claims what the blocks did not
//
// Each call makes a unit: the parameters below the module that no inner call has claimed. Each rank
// keeps its rows of each; a call of the module gathers the rest, and its end frees them again, so
// backward gathers once more. What is called last stays gathered through the turn from forward to
// backward. One step of two blocks on three streams:
//
//   gather   │ g0 │ g1 │ g0 │                            each as soon as its slot is free
//   compute       │ f0 │ f1 │ loss │ b1     │ b0     │    │ optimizer
//   reduce                                  │ r1     │ r0 │
//
// Every rank calls the same units in the same order, whatever it then does with their results. What
// only some ranks call, as an expert of their own, stays in a unit that all of them call, and isn't
// streamed: each slice is a unit.
#pragma once

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/mesh.hpp"
#include "tessera/nn/module.hpp"

namespace tessera {

// Whether a unit frees its full parameters after forward and gathers them again in backward.
class Reshard {
 public:
  static const Reshard always, never;
  // As `always`, except for those that backward needs at once: the outermost unit's, and those of a
  // call that backward comes to before any other slot is taken, as the last block's.
  static const Reshard automatic;
  // From forward to backward each rank keeps the k-th part of the full parameters, and backward
  // gathers them from k neighbours, which are on one machine if any ranks are (ZeRO++: hpZ).
  // `ranks` divides those that shard, and is neither 1 nor all of them.
  static constexpr Reshard to(int ranks) noexcept { return {Kind::to, ranks}; }

  bool operator==(const Reshard&) const = default;
  constexpr bool is_partial() const noexcept { return kind_ == Kind::to; }
  constexpr int ranks() const noexcept { return ranks_; }  // of `to`
  // "always", "to(8)"
  std::string to_string() const;
  friend std::ostream& operator<<(std::ostream& out, Reshard reshard) {
    return out << reshard.to_string();
  }

 private:
  enum class Kind : std::uint8_t { automatic, always, never, to };
  constexpr Reshard(Kind kind, int ranks = 0) noexcept : kind_(kind), ranks_(ranks) {}

  Kind kind_;
  int ranks_;
};
inline constexpr Reshard Reshard::automatic{Kind::automatic}, Reshard::always{Kind::always},
    Reshard::never{Kind::never};

// f32, bf16 or f16 (PyTorch: MixedPrecisionPolicy).
struct MixedPrecision {
  // Of the full parameters and so of compute, of those that are stored in f32; unset: f32. What
  // Parameter::set_dtype stores otherwise is gathered as it is.
  std::optional<DType> param{};
  // Of gradients on the wire: f32 or `param`; unset: f32.
  std::optional<DType> reduce{};
  // Of floating tensors that a call of the module gives; unset: as they are. Both of these know the
  // tensors that hooks do, see nn::Module::call.
  std::optional<DType> output{};
  // Whether floating tensors that go into a call become `param`, where it is set.
  bool cast_forward_inputs = true;
};

// Where a unit's shards lie with their gradients and the optimizer's moments, and where the step is
// computed (PyTorch: CPUOffloadPolicy, always pinned).
//
//   none   on the device
//   cpu    on the host beside it (Device::host): a gather casts there and brings the shard to the
//          device in one copy, a reduction takes its sums back in one. Parameter::shard and grad,
//          state dicts and clip_grad_norm's norm are tensors of the host, whose operations run on
//          the stream `offload`. The device keeps slots, activations and a staging of twice the
//          largest shard and twice the largest piece's. A CPU has both memories too, so that a plan
//          of either is a plan of both.
enum class Offload : std::uint8_t { none, cpu };

struct ShardOptions {
  // One dimension shards. Of two the first replicates: parameters are sharded over the second, and
  // gradients, averaged over all ranks, are summed over the first as well (PyTorch: HSDP; with one
  // rank in the second, DDP).
  DeviceMesh mesh;
  MixedPrecision precision = {};
  Reshard reshard_after_forward = Reshard::automatic;
  // How many gathers backward queues ahead of the unit that it enters, 1 to 64; in forward it only
  // says how many have slots apart, and so limits how far gathers run ahead.
  int prefetch_depth = 1;
  // How much of gradients is being reduced beside what is being written, 1 to 64: so many times the
  // largest piece of the unit, less a third of one.
  int reductions_in_flight = 1;
  // Of the root: how many of its forwards the host may be ahead of the device, 1 to 64. It bounds
  // the host's memory and a device's queues, however seldom the program reads a value. Other units
  // take no notice of it, nor of slice_bytes, so that one set of options serves all of a model.
  int forwards_ahead = 2;
  // Of the root: the most that one slice of a streamed parameter may have, in bytes of the full
  // tensor; see nn::Module::stream_parameter. 0: so much that the gradient of a slice is no larger
  // than the largest piece of any unit. Slices are larger where a table would have more than 256.
  std::int64_t slice_bytes = 0;
  // Whether slices wait, too, where a backward reduces nothing (set_requires_gradient_sync): the
  // whole gradient of a table is there then, on every rank. Otherwise each backward reduces them.
  bool slices_wait = false;
  // A unit's gradients are reduced in pieces, each as soon as backward has made it: a parameter
  // with so many bytes of gradient is one, smaller ones fill one together. A piece should take
  // several times the latency of a collective.
  std::int64_t piece_bytes = std::int64_t{32} << 20;
  // The same for all units of a root.
  Offload offload = Offload::none;
  // Parameters that the unit leaves alone, as units around it have to (PyTorch: ignored_params).
  // Each rank has them whole and in f32, with its own gradients, which nothing divides or sums: the
  // program does, before it clips, and with a use on every rank: one that a rank has not used is
  // skipped by its optimizer, whatever is written to grad() (add 0 * p to the loss). materialize,
  // init, optimizers, state dicts and reset take them as those of a module without units. Not with
  // offload, nor in a model that has memory.
  std::vector<Parameter> ignored{};
};

// Makes `module` a unit. Call inner modules first; the outermost call makes the root. Values that
// exist are kept, and an optimizer's moments of them; gradients are not. Throws: ContractError for
// a module that is a unit already, for a parameter that is shared with a unit outside this module
// or is to be ignored and lies in a unit, and for options that cannot take effect; and from the
// root's first call, on every rank, where ranks have made other units, given other options or
// frozen other parameters.
void fully_shard(nn::Module& module, const ShardOptions& options);
// Makes several modules one unit, of all parameters below them:
//
//   fully_shard({&model.norm, &model.head}, {.mesh = mesh});
//
// Its modules may be called in any order and at any depth under a root, which the unit itself can't
// be. The first call gathers, and the unit stays open until all modules have been called, or else
// until the outermost call of the root's units ends. Backward gathers once for these calls, and
// reduces once, where it has come back through the first of them. What is called after that, as a
// head that is called by itself for each chunk of a loss, is gathered and reduced for itself. A
// module that lies inside another one of the list belongs to that one.
// Throws: ContractError for an empty list, a null pointer, a module that is there twice, and as
// above.
void fully_shard(const std::vector<nn::Module*>& modules, const ShardOptions& options);

// What a sharded module will do: everything the engine has fixed, for printing and for assertions.
struct ShardPlan {
  struct Unit {
    std::string name;
    std::int64_t parameters = 0;   // tensors
    std::int64_t numel = 0;        // elements, without padding
    std::int64_t shard_numel = 0;  // this rank's, padding included
    // Of `numel`, what is stored in another dtype than f32, as a frozen base; each dtype once.
    std::vector<std::pair<DType, std::int64_t>> stored{};
    std::int64_t gather_bytes = 0, gradient_buffer_bytes = 0;
    // Of gather_bytes what an all-gather fills: less where gather transforms decode the rest.
    std::int64_t wire_bytes = 0;
    std::vector<std::string> transforms{};  // their names, each once
    // What backward keeps while it is told not to reduce: full gradients; sums of this rank's
    // shards that are still to be summed over the replicas. See runtime_control.hpp.
    std::int64_t unsharded_gradient_bytes = 0, postponed_sum_bytes = 0;
    DType param = f32, reduce = f32;
    bool reshard_after_forward = true;
    // What `Reshard::to` keeps until backward, over how many ranks.
    std::int64_t post_forward_bytes = 0;
    int post_forward_ranks = 0;
    // Collectives of one forward and backward that call each module once.
    int gathers_per_call = 0, reductions_per_call = 0;
  };
  std::vector<Unit> units;  // behind the modules' the slices of what they stream, as 'weight[2]'
  int ranks = 1;            // over which parameters are sharded,
  int replicas = 1;         // so many times
  // Of all slots together: where full parameters and unreduced gradients lie. Slots that are never
  // alive together share addresses.
  std::int64_t arena_bytes = 0;
  std::int64_t most_alive_bytes = 0;  // no other addresses would need fewer
  // Of what is copied from and to the host, where units are offloaded: on the device, on the host.
  std::int64_t offload_device_bytes = 0, offload_host_bytes = 0;
  bool is_assumed = true;  // no step has called the units in another order yet

  std::string to_string() const;
};
// The plan of a root, made now if no step has made it. Every rank calls it, though one may print:
// the first call allocates the arena, which is collective.
// Throws: ContractError for a module that is no unit or not materialized.
ShardPlan shard_plan(nn::Module& root);

// Collectives that a root's units have issued so far; see shard_plan for what it throws.
struct ShardCounters {
  std::uint64_t gathers = 0, reductions = 0, all_reduces = 0;
  std::uint64_t unplanned_slots =
      0;  // taken where the plan had none: by a step unlike those before
};
ShardCounters shard_counters(nn::Module& root);

// What `reset` found, the same on every rank.
struct ShardReset {
  std::string cause;  // why the step failed: the first rank that did, and what it threw
  // Every rank has the parameters and optimizer state of the same update; Optimizer::steps() says
  // which. False when the step failed while they were updated: then they are to be loaded, and a
  // step before that is a ContractError on every rank.
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
// Does World::recover with `cause`, closes all units below `tree`, and drops all their gradients,
// those of earlier micro-batches too: the step is discarded whole. Kept are parameters and
// optimizer state as they are. `tree` is the root, or where a world has several, a module around
// all of them: one that is left out must be reset and loaded before it is used again. The number of
// random draws becomes the largest of all ranks; to repeat a step with dropout bit by bit, put back
// autograd::random_state() from before it. Throws: ContractError for a module that holds no root,
// or a part of one, or units of several worlds, and inside of a call; CommError as World::recover.
ShardReset reset(nn::Module& tree, std::string_view cause = {});

// In the place of a backward that peers run and this rank leaves out, because its loss is no number
// or does not reach the model: issues what theirs does, with gradients of zero. Before anything
// else of the model. Of all forwards that no backward of this rank has covered, or of those that a
// backward of `loss` would reach. A forward whose graph is gone needs none: the next pass covers
// it. Of several forwards that peers cover in one pass a rank may cover each in one of its own,
// from the last to the first, where none before them is gone. Where peers retain the graph of
// `loss`, so does this rank, for the backward that follows. Throws: ContractError for a module that
// is no root, for a tensor without history, and inside of a backward pass; CommError when a peer
// does something else.
void skip_backward(nn::Module& root);
void skip_backward(const Tensor& loss, bool retain_graph = false);

// Calls f(name, full tensor) for every parameter below `module`, gathered one at a time from the
// shards in the dtype that they are stored in, in the same order on every rank. The tensor is lent
// for the call of f, for reading. Collective over each mesh. Throws: ContractError for a parameter
// without memory, and where the tensor is used later.
void for_each_full_parameter(
    nn::Module& module, const std::function<void(const std::string& name, const Tensor& full)>& f);

}  // namespace tessera
