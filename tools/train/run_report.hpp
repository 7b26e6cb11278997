// What a run tells: lines for people on stdout, and one line a step in metrics.jsonl. Rank 0 tells;
// the others have a report that is silent.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>

#include "tessera/comm/world.hpp"
#include "tools/train/inputs.hpp"
#include "tools/train/memory_choice.hpp"
#include "tools/train/metrics.hpp"
#include "tools/train/trainer.hpp"

namespace tessera::train {

// Of a step, the largest of all ranks. An emulated rank counts for its peers.
struct LargestOfRanks {
  double exposed_seconds = 0, host_seconds = 0;  // negative where the executor cannot tell
  std::int64_t peak_bytes = 0, planned_bytes = 0, reserved_bytes = 0;
};

// Lines and metrics are told, each until it fails. Then the run ends in order, so that the weights
// are saved before the first failure is thrown.
class RunReport {
 public:
  RunReport(const Config& config, Inputs& inputs, const World& world);

  void line(const std::string& text);
  // Model, ranks, data and plan, before the first step.
  void describe(nn::LanguageModel& model, const Chosen& chosen);
  // `step` from 0; `flops` of one token.
  void step(std::int64_t step, const StepResult& result, const LargestOfRanks& largest,
            double tokens_per_second, double flops);
  void validation(std::int64_t step, double loss);

  // On rank 0, the first; null where there was none.
  const std::exception_ptr& failure() const noexcept { return failure_; }

 private:
  template <class F>
  void attempt(bool& still, const F& f);

  const Config& config_;
  Inputs& inputs_;
  const World& world_;
  std::optional<Console> console_;      // on rank 0
  bool says_ = true, measures_ = true;  // neither stdout nor metrics.jsonl has failed
  std::exception_ptr failure_;
};

}  // namespace tessera::train
