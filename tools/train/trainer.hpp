// One rank's training state and its step: the same program for a run and for a plan. A plan is this
// program on the `virtual` executor, over memory that is counted and never touched.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/autograd/captured_step.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/nn/language_model.hpp"
#include "tessera/optim/optimizer.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tools/train/config.hpp"
#include "tools/train/step_price.hpp"
#include "tools/train/trace_file.hpp"

namespace tessera::train {

// The model that `config` describes, on meta.
std::unique_ptr<nn::LanguageModel> make_model(const Config& config);

// Floating-point operations of one token, forward and backward: 6 for each weight of a matrix
// product and 12 layers dim T for attention, the convention of Chowdhery et al., "PaLM", appendix B
// (the causal half is not taken off).
double flops_per_token(const Config& config, nn::LanguageModel& model);

// What a rank holds in a phase of a run.
struct PhaseMemory {
  std::int64_t peak_bytes = 0;                                // live
  std::int64_t reserved_bytes = 0;                            // pool and arena, at its end
  std::int64_t host_peak_bytes = 0, host_reserved_bytes = 0;  // the same of what is offloaded
  bool operator==(const PhaseMemory&) const = default;
};
// The most of each number; nothing of none.
PhaseMemory largest(std::span<const PhaseMemory> phases);

// What a step measured. Bytes are of this rank.
struct StepResult {
  double loss = 0;       // mean over the global batch, before the update
  double grad_norm = 0;  // before clipping
  double lr = 0;
  bool stop = false;            // some rank was asked to stop
  bool diverged = false;        // loss or norm is not finite, so that no weight was updated
  std::string bad_parameter{};  // then the first in the model whose gradient is not; "" for none
  double host_seconds = 0, exposed_seconds = 0;  // negative where the executor cannot tell
  PhaseMemory memory{};
};

// Fills the rows [first_row, ...) of this rank's part of a step's global batch.
using FillBatch =
    std::function<void(std::int64_t step, std::int64_t first_row, std::span<std::int32_t> inputs,
                       std::span<std::int32_t> targets)>;

// Fills held-out samples first, first + 1, ...
using FillSamples = std::function<void(std::int64_t first, std::span<std::int32_t> inputs,
                                       std::span<std::int32_t> targets)>;

class Trainer {
 public:
  // Builds, shards and materializes the model, and makes the optimizer's state. Values are zero
  // until init or load. Collective.
  Trainer(const Config& config, const World& world);

  // One optimizer step, number `step` from 0. `stop` is this rank's wish; the result tells whether
  // any rank has it.
  StepResult step(std::int64_t step, const FillBatch& fill, bool stop);
  // The mean loss over `count` held-out samples, shared among the ranks, on every rank. Leaves
  // nothing gathered, so that the next step is as any other. Collective.
  double heldout_loss(std::int64_t count, const FillSamples& fill);

  nn::LanguageModel& model() noexcept { return *model_; }
  const World& world() const noexcept { return world_; }
  // Steps that were one graph, and why the last was not, for one line; training.captured_step.
  std::string captured_steps(std::int64_t of) const;
  Memory& memory() const { return Memory::of(world_.device()); }
  // Since the ledgers' peaks were last reset.
  PhaseMemory phase_memory() const;
  void reset_peaks() const;
  // What a step or an evaluation has left open: evaluations and saves are planned without.
  void close_units() const {
    for (nn::Module* part : model_->parts()) reshard(*part);
    reshard(*model_);
  }

 private:
  // Tokens and targets of a micro-batch, from its first row in this rank's part of the batch on.
  using MicroBatch = std::function<std::pair<Tensor, Tensor>(std::int64_t row)>;
  MicroBatch from_host(std::int64_t step, const FillBatch& fill);
  // The gradients of a step, without clipping. Returns the sum of its losses, f32 [].
  Tensor accumulate(const MicroBatch& batch);
  // The same, then clipping in the optimizer's next step. Returns loss, the wish of any rank and
  // the norm, f32 [3].
  Tensor forward_and_backward(const MicroBatch& batch, const Tensor& wish);
  // The whole step, submitted by the host once and by the device again.
  Tensor run_captured(std::int64_t step, const FillBatch& fill, const Tensor& wish);
  // Clipping spreads NaN to all gradients, so a step that has diverged makes them once more, and a
  // good one pays nothing. Collective.
  std::string find_bad_parameter(std::int64_t step, const FillBatch& fill);

  const Config config_;  // with what a strategy stands for
  const World& world_;
  BatchSplit split_;
  std::unique_ptr<nn::LanguageModel> model_;
  std::vector<Parameter> parameters_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::vector<std::int32_t> inputs_, targets_;
  PhaseMemory submitted_;  // of the last step that the host submitted
  std::optional<CapturedStep> captured_;
};

// The memory that a rank will need, by running the trainer where nothing runs.
struct MemoryPlan {
  // From step 1 on, until two in a row have made no plan of slots, and the same again behind the
  // first evaluation between steps, where there is one. The last stands for every later one.
  std::vector<PhaseMemory> steps;
  std::size_t steps_before_evaluation = 0;  // of these, for the `evaluates_after` that come before
  std::int64_t evaluates_after = 0;         // it; 0: none comes
  PhaseMemory evaluation;                   // on held-out samples, a full batch a rank or more
  PhaseMemory save;                         // writing the weights
  std::string ledger;                       // owners at the peak of the last step
  ShardPlan shard;
  double flops = 0, moved_bytes = 0;  // of the last step's operations on the compute stream
  StepPrice price;                    // of the last step, with --machine

  // Number `step` from 0. Of no step where none was planned.
  PhaseMemory of_step(std::int64_t step) const;
  // The largest of the first `count` steps.
  PhaseMemory of_steps(std::int64_t count) const;
};
// `traces`, unless null, gets the timeline of the steps, by planned_machine.
MemoryPlan plan_memory(const Config& config, int rank, int ranks, TraceFile* traces = nullptr);

// How long operations take in a plan's timeline without --machine: one core of a CPU and a wire of
// its host's memory, or metrics.peak_tflops where given. An order of magnitude, for the shape of a
// step.
CostModel planned_machine(const Config& config);
// The machine of --machine, as the flags beside it change it; none without it.
std::optional<Machine> priced_machine(const Config& config);

}  // namespace tessera::train
