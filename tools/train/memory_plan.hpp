// What a rank will need and do, before it does: the trainer's program on the `virtual` executor,
// over memory that is counted and never touched.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/shard/shard_plan.hpp"
#include "tools/train/step_price.hpp"
#include "tools/train/trace_file.hpp"
#include "tools/train/trainer.hpp"

namespace tessera::train {

// The memory that a rank will need, by running the trainer where nothing runs.
struct MemoryPlan {
  // From step 1 on, until two in a row have made no plan of slots, and the same again behind the
  // first evaluation between steps, where there is one. The last stands for every later one.
  std::vector<PhaseMemory> steps;
  std::size_t steps_before_evaluation = 0;  // of these, for the `evaluates_after` that come before
  std::int64_t evaluates_after = 0;         // it; 0: none comes
  PhaseMemory evaluation;                   // on held-out samples
  PhaseMemory save;                         // writing the weights
  std::int64_t nccl_bytes = 0;              // assumed of communicators, on top of all these
  bool has_nccl = false;                    // whether they are to have room, too
  std::string ledger;                       // owners at the peak of the last step
  ShardPlan shard;
  double flops = 0, moved_bytes = 0;  // of the last step's operations on the compute stream
  StepPrice price;                    // of the last step, with --machine

  // Number `step` from 0. Of no step where none was planned.
  PhaseMemory of_step(std::int64_t step) const;
  // The largest of the first `count` steps.
  PhaseMemory of_steps(std::int64_t count) const;
};
// `heldout_batches`: full batches a rank of an evaluation. From the second on units that are never
// resharded are open from its beginning, so two tell of more. `traces`, unless null, gets the
// timeline of the steps, by planned_machine.
MemoryPlan plan_memory(const Config& config, int rank, int ranks, TraceFile* traces = nullptr,
                       std::int64_t heldout_batches = 2);

// How long operations take in a plan's timeline without --machine: one core of a CPU and a wire of
// its host's memory, or metrics.peak_tflops where given. An order of magnitude, for the shape of a
// step.
CostModel planned_machine(const Config& config);
// The machine of --machine, as the flags beside it change it; none without it.
std::optional<Machine> priced_machine(const Config& config);

}  // namespace tessera::train
