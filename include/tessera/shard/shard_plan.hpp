// What a sharded model will do, before and after it has: its units, the collectives of a step, and
// the memory of its slots, which a step of the program's own, run without bodies, may plan.
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

// What a sharded module will do: everything the engine has fixed, for printing and for assertions.
struct ShardPlan {
  struct Unit {
    std::string name;
    std::int64_t parameters = 0;   // tensors
    std::int64_t numel = 0;        // elements, without padding
    std::int64_t shard_numel = 0;  // this rank's, padding included
    // Of `numel`, what is stored in another dtype than f32, as a frozen base; each dtype once.
    std::vector<std::pair<DType, std::int64_t>> stored{};
    // And what MixedPrecision::param_override_fn has gathered in another dtype than `param`.
    std::vector<std::pair<DType, std::int64_t>> overridden{};
    // And what is sharded by blocks of so many rows and travels by counts; each size once.
    std::vector<std::pair<std::int64_t, std::int64_t>> ragged{};
    // And what is sharded along another dimension than that of rows; each dimension once.
    std::vector<std::pair<int, std::int64_t>> along{};
    std::int64_t gather_bytes = 0, gradient_buffer_bytes = 0;
    // Of these what an all-gather fills, and a reduce-scatter sums, with the alignment between
    // parameters, which does not travel: less where gather transforms decode the rest, and where
    // small chunks travel packed.
    std::int64_t wire_bytes = 0, reduced_bytes = 0;
    // Of how many tensors chunks travel packed in a gather and in a reduction, and the bytes that
    // are copied for it.
    std::int64_t packed_parameters = 0, packed_gradient_parameters = 0;
    std::int64_t packed_bytes = 0, packed_gradient_bytes = 0;
    std::vector<std::string> transforms{};  // their names, each once
    // What backward keeps while it is told not to reduce: full gradients; sums of this rank's
    // shards that are still to be summed over the replicas. See runtime_control.hpp.
    std::int64_t unsharded_gradient_bytes = 0, postponed_sum_bytes = 0;
    DType param = f32, reduce = f32;
    bool reshard_after_forward = true;
    // What `Reshard::to` keeps until backward, over how many ranks; of gathers_per_call those that
    // are among these, and what one of them fills.
    std::int64_t post_forward_bytes = 0;
    int post_forward_ranks = 0, post_forward_gathers = 0;
    std::int64_t post_forward_wire_bytes = 0;
    // Collectives of one forward and backward that call each module once, by what the program has
    // set until now; a reduction is one however many pieces it goes in.
    int gathers_per_call = 0, reductions_per_call = 0;
    // Reductions whose sums are summed over the replicas, too, and this rank's bytes of one: values
    // and arrival counts.
    int all_reduces_per_call = 0;
    std::int64_t all_reduce_bytes = 0;
    // In the same forward and backward, between this rank's device and host: shards that are
    // offloaded, as they are gathered, and reduced gradients with arrival counts.
    std::int64_t copied_to_device_bytes = 0, copied_to_host_bytes = 0;
    // What options or the program have set; see ShardOptions and runtime_control.hpp.
    int prefetch_depth = 1, reductions_in_flight = 1;
    std::optional<DType> output{};
    bool casts_inputs = true;  // to `param`
    double divide_factor = 1;  // at first the number of ranks, replicas included
    bool has_all_reduce_hook = false, reshards_after_backward = true;
    std::vector<std::string> forward_prefetch{}, backward_prefetch{};  // units, as they are listed
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
  // Parameters that are in no unit (ShardOptions::ignored): tensors, elements. Each rank has all.
  std::int64_t ignored_parameters = 0, ignored_numel = 0;
  int forwards_ahead = 2;  // how many the host may be ahead of the device
  bool is_assumed = true;  // no step has called the units in another order yet

  std::string to_string() const;
};
// The plan of a root, made now if no step has made it. Every rank calls it, though one may print:
// the first call allocates the arena, which is collective.
// Throws: ContractError for a module that is no unit or not materialized.
ShardPlan shard_plan(nn::Module& root);
// The plan of the program's own step, before its first. `step` gets a World::emulated as this
// rank, in which nothing runs and memory is only counted; it makes the same model there,
// with the same calls of fully_shard, does a step of it, and gives it back:
//
//   shard_plan(model, [&](World& world) {
//     auto planned = std::make_shared<Model>(config);
//     shard(*planned, world);
//     planned->materialize(world.device());
//     loss_of(*planned, batch(world)).backward();
//     return planned;
//   });
//
// A first step that calls the root once takes every slot where later ones do then, whatever units
// it calls in which order. Steps that alternate, as some trainings and an evaluation, or call the
// root several times, it does for a few of their rounds; a slot that the first of them takes
// elsewhere all the same is counted (ShardCounters::unplanned_slots). Every rank calls it, before
// the first call of the root. Throws: as above; what `step` throws, on this rank; ContractError
// where it has not called its model, or that lies in another world or differs from `root`, and, on
// every rank, where ranks have planned other steps or `root` has run. CommError where a peer's has
// thrown.
ShardPlan shard_plan(nn::Module& root,
                     const std::function<std::shared_ptr<nn::Module>(World&)>& step);

// Collectives that a root's units have issued so far, a unit's pieces as one; see shard_plan for
// what it throws.
struct ShardCounters {
  std::uint64_t gathers = 0, reductions = 0, all_reduces = 0;
  // Taken where the plan had none: by a step unlike those before, or one of several forwards, which
  // begins with what the last has left open and may go on to take some so.
  std::uint64_t unplanned_slots = 0;
  // Plans of slots that were made of steps, those for which none had been; of the last step when
  // the next one begins.
  std::uint64_t slot_plans = 0;
};
ShardCounters shard_counters(nn::Module& root);

}  // namespace tessera
