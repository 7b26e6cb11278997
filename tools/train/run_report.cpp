#include "tools/train/run_report.hpp"

#include <cmath>

#include "runtime/base/machine.hpp"
#include "tessera/base/error.hpp"
#include "tools/train/dry_run.hpp"

namespace tessera::train {
namespace {

// Which of its ways NCCL was given.
std::string describe_nccl(const NcclOptions& options) {
  return concat("NCCL: ", options.windows ? "windows" : "no windows",
                options.gather_policy == GatherPolicy::zero
                    ? ", gathers by copy engines where it can"
                : options.gather_policy == GatherPolicy::measured ? ", gathers as measured"
                                                                  : ", gathers as it wants",
                options.reduce_max_ctas > 0
                    ? concat(", reductions with at most ", options.reduce_max_ctas, " CTAs")
                : options.reduce_max_ctas < 0 ? ", reductions as measured"
                                              : ", reductions with as many CTAs as it wants",
                options.ordered_sums ? ", all sums in rank order" : "");
}

}  // namespace

RunReport::RunReport(const Config& config, Inputs& inputs, const World& world)
    : config_(config), inputs_(inputs), world_(world) {
  if (world.rank() == 0)
    console_.emplace(Terminal::detect(), config.training.steps, config.metrics.log_freq,
                     physical_memory_bytes());
}

template <class F>
void RunReport::attempt(bool& still, const F& f) {
  if (!console_ || !still) return;
  try {
    f();
  } catch (const DeviceError&) {
    still = false;
    if (!failure_) failure_ = std::current_exception();
  }
}

void RunReport::line(const std::string& text) {
  attempt(says_, [&] { console_->line(text); });
}

void RunReport::describe(nn::LanguageModel& model, const Chosen& chosen) {
  line(concat("model ", config_.model.name == ModelName::llama ? "llama" : "gpt2", " with ",
              model.numel(), " parameters on ", world_.size(),
              world_.size() == 1 ? " rank" : " ranks",
              world_.device().kind() == DeviceKind::cuda
                  ? concat(" on ", config_.flags.device)
                  : concat(", ", world_.threads(), world_.threads() == 1 ? " thread" : " threads",
                           " a rank")));
  if (const std::string strategy = describe_strategy(config_, world_.size()); !strategy.empty())
    line(strategy);
  if (world_.kind() == WorldKind::nccl) line(describe_nccl(nccl_options(config_)));
  if (world_.kind() == WorldKind::emulated)
    line(concat("emulated: the first of ", world_.size(),
                " ranks runs without its peers; the wire takes no time, and losses and norms, "
                "which mean nothing, are not shown"));
  if (inputs_.loader)
    line(concat("data ", config_.data.path, ": ", inputs_.loader->samples(), " samples of ",
                config_.training.seq_len, " tokens to train on, ",
                inputs_.loader->heldout_samples(), " held out"));
  line(concat("memory planned: ", mebibytes(chosen.plan.steps.back().peak_bytes),
              " a rank at the peak of a step"));
  if (!chosen.told.empty()) line(chosen.told);
}

void RunReport::step(std::int64_t step, const StepResult& result, const LargestOfRanks& largest,
                     double tokens_per_second, double flops) {
  StepMetrics m;
  m.step = step + 1;
  const bool means = world_.kind() != WorldKind::emulated;  // sums over ranks that are there
  m.loss = means ? result.loss : std::nan("");
  m.grad_norm = means ? result.grad_norm : std::nan("");
  m.lr = result.lr;
  m.tokens_per_second = tokens_per_second;
  m.tflops = tokens_per_second * flops / world_.size() * 1e-12;
  if (config_.metrics.peak_tflops) m.mfu = *m.tflops / *config_.metrics.peak_tflops;
  if (largest.exposed_seconds >= 0) m.exposed_comm_ms = largest.exposed_seconds * 1e3;
  if (largest.host_seconds >= 0) m.host_ms = largest.host_seconds * 1e3;
  m.memory_peak_bytes = largest.peak_bytes;
  m.memory_planned_bytes = largest.planned_bytes;
  m.memory_reserved_bytes = largest.reserved_bytes;
  attempt(measures_, [&] {
    if (inputs_.jsonl) inputs_.jsonl->write(m);
  });
  attempt(says_, [&] { console_->step(m); });
}

void RunReport::validation(std::int64_t step, double loss) {
  attempt(says_, [&] { console_->validation(step, loss); });
}

}  // namespace tessera::train
