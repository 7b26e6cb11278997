// The run on one rank after another's plan: load or init, train, validate, sample, save. Rank 0
// speaks.
#include "tools/train/train.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "runtime/device/testing.hpp"
#include "tessera/base/log.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tessera/device/workers.hpp"
#include "tessera/run/run.hpp"
#include "tessera/run/watchdog.hpp"
#include "tools/train/agreement.hpp"
#include "tools/train/dry_run.hpp"
#include "tools/train/flight_record_file.hpp"
#include "tools/train/inputs.hpp"
#include "tools/train/memory_account.hpp"
#include "tools/train/memory_choice.hpp"
#include "tools/train/run_checkpoints.hpp"
#include "tools/train/run_report.hpp"
#include "tools/train/signals.hpp"
#include "tools/train/text_sample.hpp"

namespace tessera::train {
namespace {

WorldOptions world_options(const Config& config, const std::shared_ptr<RaceChecker>& checker) {
  return {.device = device_choice(config),
          .executor = config.debug.executor,
          .threads = static_cast<int>(config.flags.threads.value_or(0)),
          .profiler_ranges = config.metrics.nvtx,
          .race_checker = checker,
          .timeout_seconds = static_cast<double>(config.comm.train_timeout_seconds),
          .heartbeat_timeout_seconds = static_cast<double>(config.comm.heartbeat_timeout_seconds),
          .init_timeout_seconds = static_cast<double>(config.comm.init_timeout_seconds),
          .nccl = nccl_options(config)};
}

// Collective.
LargestOfRanks largest_of(const StepResult& step, const PhaseMemory& planned, const World& world) {
  // Byte counts travel as doubles, which hold them exactly.
  double most[] = {
      step.exposed_seconds, step.host_seconds, static_cast<double>(step.memory.peak_bytes),
      static_cast<double>(planned.peak_bytes), static_cast<double>(step.memory.reserved_bytes)};
  world.max(most);
  const auto bytes = [](double count) { return static_cast<std::int64_t>(count); };
  return {most[0], most[1], bytes(most[2]), bytes(most[3]), bytes(most[4])};
}

// The run of one rank.
class Run {
 public:
  Run(const Config& config, Inputs& inputs, const World& world, TraceFile* traces)
      : config_(config),
        inputs_(inputs),
        world_(world),
        traces_(traces),
        speaks_(world.rank() == 0) {}

  // Returns 0, or 128 + signal.
  int operator()() {
    DeviceContext& device = world_.device().context();
    if (config_.debug.delay_seed != 0 && device.driver() != nullptr)
      delay_operations(device, static_cast<std::uint64_t>(config_.debug.delay_seed));
    {
      const auto model = make_model(config_);
      if (inputs_.load) named("--load", [&] { nn::check_load(*model, *inputs_.load); });
      if (config_.checkpoint.enable) {
        install_signal_handlers();  // a folder that is tried has to be taken away again
        checkpoints_ = std::make_unique<RunCheckpoints>(config_, inputs_, world_, model->numel());
        if (const int signal = agreed_signal(); signal != 0) return 128 + signal;
        restore_signal_handlers();
      }
      if (speaks_ && !config_.flags.save.empty())
        named("--save", [&] { check_space(config_.flags.save, 4 * model->numel()); });
      if (config_.training.steps > 0) {
        chosen_ =
            choose_for(config_, world_, inputs_.loader ? inputs_.loader->heldout_samples() : 1);
        config_ = chosen_.config;
      }
      check_machine(chosen_.plan, world_, 4 * model->numel());
    }
    trainer_ = std::make_unique<Trainer>(config_, world_);
    nn::LanguageModel& model = trainer_->model();
    nn::init(model, {static_cast<std::uint64_t>(config_.debug.seed)});
    if (inputs_.load) named("--load", [&] { nn::load(model, *inputs_.load); });
    if (checkpoints_) checkpoints_->prepare(*trainer_);
    world_.barrier();
    report_.emplace(config_, inputs_, world_);
    account_.emplace(chosen_.plan, world_, *report_);
    if (config_.training.steps > 0) report_->describe(model, chosen_);
    if (checkpoints_) {
      checkpoints_->resume(*trainer_, lines_);
      first_step_ = steps_done_ = checkpoints_->first_step();
      if (inputs_.jsonl) named("metrics.jsonl", [&] { inputs_.jsonl->keep_until(first_step_); });
    }
    install_signal_handlers();  // since the folder was tried there was nothing to end in order
    const bool stopped = train();
    if (!save_failure_) keep([&] { checkpoints_->finish(lines_); });
    if (const int signal = agreed_signal(); stopped && signal != 0)
      report_->line(concat("stopped by ",
                           signal == SIGINT   ? "SIGINT"
                           : signal == SIGHUP ? "SIGHUP"
                                              : "SIGTERM",
                           " after step ", steps_done_));
    if (steps_done_ > first_step_) report_memory();
    account_->report_evaluation();
    // Else nothing that was not there before.
    const bool learnt = !diverged_ || steps_done_ > first_step_ + 1;
    const std::string saved = config_.flags.save.empty() ? "nothing was saved"
                              : learnt                   ? save(model)
                                                         : "there was no step before it to save";
    int signal = agreed_signal();
    if (speaks_ && traces_) traces_->write();
    for (const std::exception_ptr& failure : {save_failure_, report_->failure()})
      if (failure) std::rethrow_exception(failure);
    if (!stopped && !config_.flags.sample.empty()) {
      restore_signal_handlers();  // nothing is left to save
      signal = agreed_signal();
      if (signal == 0) report_->line(continued_text(model, config_));
    }
    if (diverged_) {
      if (speaks_)
        log(LogLevel::error,
            concat("training.stop_on_nan: ", not_finite_, " of step ", steps_done_,
                   " is not finite; ", saved, "; lower optimizer.lr or look at the data"));
      return 1;
    }
    if (!is_saved_) return 1;
    return signal != 0 ? 128 + signal : stopped ? 128 + SIGTERM : 0;
  }

 private:
  // Collective. The last of the signals that any rank was sent, 0 for none: one rank may be sent
  // another than its peers, and all end with one code.
  int agreed_signal() const { return static_cast<int>(world_.max(requested_signal())); }

  // What checkpoints do. Where a save fails the run ends in order, too. Returns whether it goes on.
  template <class F>
  bool keep(const F& f) {
    try {
      if (checkpoints_) f();
      return true;
    } catch (const SaveFailed&) {
      save_failure_ = std::current_exception();
      return false;
    }
  }

  // The first sample of a step, in the order of training.
  std::int64_t sample_of(std::int64_t step) const {
    return (checkpoints_ ? checkpoints_->first_sample() : 0) +
           (step - first_step_) * split_batch(config_, world_.size()).global;
  }

  // Returns whether it was stopped.
  bool train() {
    const BatchSplit split = split_batch(config_, world_.size());
    const FillBatch fill = [&](std::int64_t step, std::int64_t row, std::span<std::int32_t> inputs,
                               std::span<std::int32_t> targets) {
      inputs_.loader->batch_from(sample_of(step), world_.rank(), world_.size(), row, inputs,
                                 targets);
    };
    const double tokens = static_cast<double>(split.global * config_.training.seq_len);
    const double flops = flops_per_token(config_, trainer_->model());
    StepTrace trace(traces_, world_, StepTrace::Of::run);
    for (std::int64_t step = first_step_; step < config_.training.steps; ++step) {
      const auto begin = std::chrono::steady_clock::now();
      const StepResult result = trace.during(step, [&] {
        return trainer_->step(step, fill, requested_signal() != 0 || report_->failure(),
                              checkpoints_ ? checkpoints_->term() : 0);
      });
      if (step + 1 == std::min(config_.training.steps, first_step_ + StepTrace::kSteps) ||
          result.stop || result.diverged)
        trace.finish();
      const LargestOfRanks largest =
          largest_of(result, chosen_.plan.of_step(step - first_step_), world_);
      const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
      steps_done_ = step + 1;
      account_->add_step(step - first_step_, result.memory, largest.peak_bytes);
      report_->step(step, result, largest, tokens / wall.count(), flops);
      diverged_ = result.diverged;
      if (diverged_)
        not_finite_ = !result.bad_parameter.empty()
                          ? concat("the gradient of '", result.bad_parameter, "'")
                      : std::isfinite(result.loss) ? "the norm of the gradient"
                                                   : "the loss";
      if (!keep([&] { checkpoints_->poll(result.saving, lines_); }) || diverged_) return true;
      if (checkpoints_ &&
          checkpoints_->is_due(steps_done_, result.stop || steps_done_ == config_.training.steps)) {
        const bool is_kept = keep(
            [&] { checkpoints_->save(*trainer_, steps_done_, sample_of(steps_done_), lines_); });
        // A signal that came meanwhile needs no step of its own.
        if (!is_kept || agreed_signal() != 0) return true;
      }
      if (result.stop) return true;
      const std::int64_t freq = config_.validation.freq;
      if (freq > 0 && (step + 1) % freq == 0 && step + 1 < config_.training.steps)
        validate_model(step + 1);
    }
    validate_model(config_.training.steps);
    return false;
  }

  void validate_model(std::int64_t step) {
    if (!inputs_.loader || inputs_.loader->heldout_samples() == 0) return;
    if (world_.kind() == WorldKind::emulated) return;
    trainer_->reset_peaks();
    const double loss = trainer_->heldout_loss(
        inputs_.loader->heldout_samples(),
        [&](std::int64_t first, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
          inputs_.loader->heldout(first, inputs, targets);
        });
    report_->validation(step, loss);
    account_->add_evaluation(trainer_->phase_memory());
  }

  // Collective.
  void report_memory() {
    const std::int64_t count = steps_done_ - first_step_;
    account_->report_steps(first_step_, count);
    if (config_.training.captured_step) report_->line(trainer_->captured_steps(steps_done_));
    if (config_.training.enable_cpu_offload || config_.checkpoint.stages())
      account_->report_host(count);
  }

  // Returns what became of the weights, after "... of step N is not finite; ".
  std::string save(nn::LanguageModel& model) {
    trainer_->close_units();
    trainer_->reset_peaks();
    try {
      checkpoint::save_weights(config_.flags.save, model, world_,
                               {.dtype = config_.checkpoint.export_dtype,
                                .must_be_finite = config_.training.stop_on_nan});
    } catch (const checkpoint::NotFinite& error) {
      is_saved_ = false;
      if (!diverged_ && speaks_)
        log(LogLevel::error,
            concat("training.stop_on_nan: ", error.what(),
                   steps_done_ > 0 ? "; lower optimizer.lr or look at the data"
                                   : "; look at --load and checkpoint.export_dtype"));
      return "the weights before it are not finite either, so nothing is written";
    } catch (const DataError& error) {  // it could be written when the run began
      throw DeviceError(error.what(), error.where());
    }
    if (steps_done_ > first_step_) account_->report_save(trainer_->phase_memory());
    return "the weights before it are saved";
  }

  Config config_;  // with what was chosen
  Inputs& inputs_;
  const World& world_;
  TraceFile* traces_;  // null without --trace
  bool speaks_;
  Chosen chosen_;  // nothing without a step to train
  std::unique_ptr<Trainer> trainer_;
  std::optional<RunReport> report_;       // from the trainer on
  std::optional<MemoryAccount> account_;  // beside it
  // Folders may have any name.
  const RunCheckpoints::Say lines_ = [this](const std::string& line) {
    report_->line(printable(line));
  };
  std::unique_ptr<RunCheckpoints> checkpoints_;  // null without checkpoint.enable
  std::int64_t first_step_ = 0;                  // which is the first that this run takes
  std::exception_ptr save_failure_;              // of a checkpoint, on all ranks
  std::int64_t steps_done_ = 0;
  bool diverged_ = false;   // in step steps_done_
  std::string not_finite_;  // there
  bool is_saved_ = true;    // or nothing was to be
};

}  // namespace

int train(const Config& config, const LaunchEnvironment& environment,
          const std::shared_ptr<RaceChecker>& race_checker) {
  std::optional<int> threads;
  if (config.flags.ranks) threads = static_cast<int>(*config.flags.ranks);
  const int ranks = config.world_size(job_size(environment, threads));
  const bool writes = environment.rank == 0;
  if (config.flags.dry_run) {
    if (!writes) return 0;
    open_inputs(config, ranks, 0);
    return dry_run(config, ranks);
  }
  if (config.flags.emulate && environment.several_processes())
    throw DataError("--emulate: runs one process without peers; leave the launcher out");
  std::optional<TraceFile> traces;  // of this process's ranks, where it writes
  if (!config.flags.trace.empty() && writes) traces.emplace(config.flags.trace);
  const WorldOptions options = world_options(config, race_checker);
  FlightRecordFiles records(config.comm.flight_record);
  std::optional<Inputs> inputs;  // one set serves all ranks of a process
  if (!environment.several_processes()) {
    inputs = open_inputs(config, ranks, 0);
    look_at_tokens(*inputs);
  }
  int code = 0;
  const auto rank = [&](const World& world) {
    if (!inputs) {  // under MPI, which alone knows the number of ranks
      validate(config, world.size());
      inputs = open_inputs(config, world.size(), world.rank());
      check_agreement(config, *inputs, world);
      look_at_tokens(*inputs, &world);
    }
    const int own = records.during(
        world, [&] { return Run(config, *inputs, world, traces ? &*traces : nullptr)(); });
    if (environment.several_processes() || world.rank() == 0) code = own;
  };
  Watchdog watchdog(options.timeout_seconds, [&records] {
    records.write_all("a thread hangs");
    const int signal = requested_signal();
    return signal != 0 ? 128 + signal : 1;
  });
  if (environment.ends_with_parent) watchdog.end_with_parent();
  if (config.flags.emulate)
    rank(World::emulated(0, ranks, options));
  else
    run_ranks(environment, threads, options, rank);
  return code;
}

}  // namespace tessera::train
