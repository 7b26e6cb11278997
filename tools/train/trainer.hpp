// One rank's training state and its step: the same program for a run and for a plan, which is
// memory_plan.hpp's.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/autograd/captured_step.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/nn/language_model.hpp"
#include "tessera/optim/optimizer.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tools/train/config.hpp"

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
  double saving = 0;            // the sum of what the ranks have given
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
  // any rank has it. `saving` is what Saver::term gives.
  StepResult step(std::int64_t step, const FillBatch& fill, bool stop, double saving = 0);
  // The mean loss over `count` held-out samples, shared among the ranks, on every rank. Leaves
  // nothing gathered, so that the next step is as any other. Collective.
  double heldout_loss(std::int64_t count, const FillSamples& fill);

  // Of a checkpoint, as they are read: weights, and what the optimizer keeps.
  std::vector<checkpoint::Part> parts();
  nn::LanguageModel& model() noexcept { return *model_; }
  optim::Optimizer& optimizer() noexcept { return *optimizer_; }
  // Weight decays and rates as the configuration has them, whatever was loaded.
  void set_rates();
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
  // The same, then clipping in the optimizer's next step. `own`, f32 [2]: this rank's wish to stop
  // and how far its save is. Returns the loss, the sums of these over the ranks, and the norm,
  // f32 [4].
  Tensor forward_and_backward(const MicroBatch& batch, const Tensor& own);
  // The whole step, submitted by the host once and by the device again.
  Tensor run_captured(std::int64_t step, const FillBatch& fill, const Tensor& own);
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

}  // namespace tessera::train
