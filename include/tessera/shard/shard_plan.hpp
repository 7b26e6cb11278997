// What a sharded model will do, before and after it has done it: its units, the collectives of a
// step, and the memory of its slots. A dry run of the program's own step may plan the slots.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/world.hpp"
#include "tessera/nn/module.hpp"

namespace tessera {

// Everything that the engine has fixed for a sharded module: to be printed, or asserted.
struct ShardPlan {
  struct Unit {
    std::string name;
    std::int64_t parameters = 0;   // tensors
    std::int64_t numel = 0;        // elements, without padding
    std::int64_t shard_numel = 0;  // this rank's, padding included
    // Elements of `numel` that are stored in another dtype than f32, as a frozen base; each dtype
    // once.
    std::vector<std::pair<DType, std::int64_t>> stored{};
    // Elements that MixedPrecision::param_override_fn has gathered in another dtype than `param`.
    std::vector<std::pair<DType, std::int64_t>> overridden{};
    // Rows of a block, and elements that are sharded by such blocks and travel by counts; each
    // once.
    std::vector<std::pair<std::int64_t, std::int64_t>> ragged{};
    // Another dimension than that of rows, and elements that are sharded along it; each once.
    std::vector<std::pair<int, std::int64_t>> along{};
    // Bytes of its slots: for full parameters, and for full gradients. 0 if one rank needs no slot.
    std::int64_t gather_bytes = 0, gradient_buffer_bytes = 0;
    // What an all-gather fills of the one, and what a reduce-scatter sums of the other, alignment
    // between parameters included. It is less where a parameter lies in a slot twice: as it travels
    // (encoded, or packed) and as kernels read or write it.
    std::int64_t wire_bytes = 0, reduced_bytes = 0;
    // How many tensors' chunks travel packed in a gather and in a reduction, and the bytes that are
    // copied for it.
    std::int64_t packed_parameters = 0, packed_gradient_parameters = 0;
    std::int64_t packed_bytes = 0, packed_gradient_bytes = 0;
    std::vector<std::string> transforms{};  // their names, each once
    // What backward keeps while it is told not to reduce; see runtime_control.hpp. First, full
    // gradients. Second, sums of this rank's shards that are still to be summed over the replicas.
    std::int64_t unsharded_gradient_bytes = 0, postponed_sum_bytes = 0;
    DType param = f32, reduce = f32;
    bool reshard_after_forward = true;
    // What `Reshard::to` keeps until backward, and over how many ranks. How many of
    // gathers_per_call are gathers from these ranks, and the bytes that one of them fills.
    std::int64_t post_forward_bytes = 0;
    int post_forward_ranks = 0, post_forward_gathers = 0;
    std::int64_t post_forward_wire_bytes = 0;
    // Collectives of one forward and backward that call each module once, by what the program has
    // set until now. A reduction counts as one, however many pieces it goes in.
    int gathers_per_call = 0, reductions_per_call = 0;
    // Reductions whose sums go on over the replicas, and this rank's bytes of one: values and
    // arrival counts.
    int all_reduces_per_call = 0;
    std::int64_t all_reduce_bytes = 0;
    // Bytes between this rank's device and host in the same forward and backward. To the device go
    // offloaded shards, as they are gathered. To the host go reduced gradients with arrival counts.
    std::int64_t copied_to_device_bytes = 0, copied_to_host_bytes = 0;
    // What options or the program have set; see ShardOptions and runtime_control.hpp.
    int prefetch_depth = 1, reductions_in_flight = 1;
    std::optional<DType> output{};
    bool casts_inputs = true;  // to `param`
    double divide_factor = 1;  // at first the number of ranks, replicas included
    bool has_all_reduce_hook = false, reshards_after_backward = true;
    std::vector<std::string> forward_prefetch{}, backward_prefetch{};  // units, as they are listed
  };
  std::vector<Unit> units;  // of modules, then slices of what these stream, as 'weight[2]'
  int ranks = 1;            // that shard the parameters
  int replicas = 1;         // of the sharded whole
  // Bytes of all slots, where full parameters and unreduced gradients lie. Slots that are never
  // alive together share addresses.
  std::int64_t arena_bytes = 0;
  std::int64_t most_alive_bytes = 0;  // of slots alive at a time: no addresses need fewer
  // Of gradients that lie in symmetric memory, step after step, as NcclOptions::windows has it; 0:
  // none does, and gradients come from the pool.
  std::int64_t symmetric_gradient_bytes = 0;
  // Staging for what is copied from and to the host, where units are offloaded: on the device, on
  // the host.
  std::int64_t offload_device_bytes = 0, offload_host_bytes = 0;
  // Parameters that are in no unit (ShardOptions::ignored): tensors, elements. Each rank has all.
  std::int64_t ignored_parameters = 0, ignored_numel = 0;
  int forwards_ahead = 2;  // how many the host may be ahead of the device
  bool is_assumed = true;  // no step has called the units in another order yet

  std::string to_string() const;
};
// The plan of a root, made now if no step has made it. Every rank calls it, even if one prints it,
// because the first call allocates the arena, which is collective. Throws: ContractError for a
// module that is no unit or not materialized.
ShardPlan shard_plan(nn::Module& root);
// The plan of the program's own step, before its first. `step` gets a World::emulated as this rank,
// in which nothing runs and memory is only counted. It makes the same model there, with the same
// calls of fully_shard. Then it does a step of this model, and returns it:
//
//   shard_plan(model, [&](World& world) {
//     auto planned = std::make_shared<Model>(config);
//     shard(*planned, world);
//     planned->materialize(world.device());
//     loss_of(*planned, batch(world)).backward();
//     return planned;
//   });
//
// A first step that calls the root once then takes every slot where later ones do, whatever units
// it calls in which order. Steps may alternate, as some trainings and an evaluation, or call the
// root several times; then `step` does a few of their rounds. A slot that the first of them takes
// elsewhere all the same is counted (ShardCounters::unplanned_slots). Every rank calls it, before
// the first call of the root.
//   Throws: as above; what `step` throws, on this rank; CommError where a peer's has thrown.
// ContractError where `step` has not called its model, or where that lies in another world or
// differs from `root`. ContractError on every rank where ranks have planned other steps or `root`
// has run.
ShardPlan shard_plan(nn::Module& root,
                     const std::function<std::shared_ptr<nn::Module>(World&)>& step);

// Collectives that a root's units have issued so far; the pieces of a unit count as one.
struct ShardCounters {
  std::uint64_t gathers = 0, reductions = 0, all_reduces = 0;
  // Slots that were taken where the plan had none. A step unlike those before takes such slots. One
  // of several forwards may take some, too, because it begins with what the last has left open.
  std::uint64_t unplanned_slots = 0;
  // Plans of slots that were made from steps, one for each kind of step that had none. The plan of
  // the last step is made when the next one begins.
  std::uint64_t slot_plans = 0;
};
// Every rank calls it, and it throws, as shard_plan.
ShardCounters shard_counters(nn::Module& root);

}  // namespace tessera
