// The run on one rank after another's plan: load or init, train, validate, sample, save. Rank 0
// speaks.
#include "tools/train/train.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/base/machine.hpp"
#include "runtime/comm/planned_nccl.hpp"
#include "runtime/device/testing.hpp"
#include "tessera/base/log.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tessera/device/workers.hpp"
#include "tessera/nn/generate.hpp"
#include "tessera/run/run.hpp"
#include "tessera/run/watchdog.hpp"
#include "tools/train/agreement.hpp"
#include "tools/train/dry_run.hpp"
#include "tools/train/flight_record_file.hpp"
#include "tools/train/inputs.hpp"
#include "tools/train/memory_choice.hpp"
#include "tools/train/memory_plan.hpp"
#include "tools/train/run_checkpoints.hpp"
#include "tools/train/signals.hpp"

namespace tessera::train {
namespace {

// Byte counts travel as doubles, which hold them exactly.
std::int64_t bytes_of(double count) { return static_cast<std::int64_t>(count); }

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
      if (config_.checkpoint.enable)
        checkpoints_ = std::make_unique<RunCheckpoints>(config_, inputs_, world_, model->numel());
      if (speaks_ && !config_.flags.save.empty())
        named("--save", [&] { check_space(config_.flags.save, 4 * model->numel()); });
      if (config_.training.steps > 0) choose();
      check_memory(4 * model->numel());
    }
    trainer_ = std::make_unique<Trainer>(config_, world_);
    nn::LanguageModel& model = trainer_->model();
    nn::init(model, {static_cast<std::uint64_t>(config_.debug.seed)});
    if (inputs_.load) named("--load", [&] { nn::load(model, *inputs_.load); });
    if (checkpoints_) checkpoints_->prepare(*trainer_);
    world_.barrier();
    if (speaks_)
      console_ = std::make_unique<Console>(Terminal::detect(), config_.training.steps,
                                           config_.metrics.log_freq, physical_memory_bytes());
    if (config_.training.steps > 0) say([&] { describe(model); });
    if (checkpoints_) {
      checkpoints_->resume(*trainer_, lines_);
      first_step_ = steps_done_ = checkpoints_->first_step();
      if (inputs_.jsonl) named("metrics.jsonl", [&] { inputs_.jsonl->keep_until(first_step_); });
    }
    install_signal_handlers();  // until now there was nothing to end in order
    const bool stopped = train();
    if (!save_failure_) keep([&] { checkpoints_->finish(lines_); });
    if (const int signal = agreed_signal(); stopped && signal != 0)
      say([&] {
        console_->line(concat("stopped by ",
                              signal == SIGINT   ? "SIGINT"
                              : signal == SIGHUP ? "SIGHUP"
                                                 : "SIGTERM",
                              " after step ", steps_done_));
      });
    if (steps_done_ > first_step_) report_memory();
    if (evaluation_.peak_bytes > 0) report_phase("evaluation", plan_.evaluation, evaluation_);
    // Else nothing that was not there before.
    const bool learnt = !diverged_ || steps_done_ > first_step_ + 1;
    const std::string saved = config_.flags.save.empty() ? "nothing was saved"
                              : learnt                   ? save(model)
                                                         : "there was no step before it to save";
    int signal = agreed_signal();
    if (speaks_ && traces_) traces_->write();
    for (const std::exception_ptr& failure : {save_failure_, output_failure_})
      if (failure) std::rethrow_exception(failure);
    if (!stopped && !config_.flags.sample.empty()) {
      restore_signal_handlers();  // nothing is left to save
      signal = agreed_signal();
      if (signal == 0) sample(model);
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

  // Collective.
  void choose() {
    if (world_.kind() != WorldKind::nccl) config_.comm.windows = false;  // nor are there granules
    const std::int64_t heldout = inputs_.loader ? inputs_.loader->heldout_samples() : 1,
                       batch = split_batch(config_, world_.size()).local * world_.size();
    Chosen chosen = choose_by_memory(
        config_, memory_limit(config_, world_),
        [&](const Config& c) {
          MemoryPlan plan = plan_memory(c, world_.rank(), world_.size(), nullptr,
                                        std::clamp<std::int64_t>(ceil_div(heldout, batch), 1, 2));
          plan.has_nccl = world_.kind() == WorldKind::nccl && !c.memory.limit;  // it shares the GPU
          return plan;
        },
        [this](double bytes) { return world_.max(bytes); });
    config_ = std::move(chosen.config);
    plan_ = std::move(chosen.plan);
    chosen_ = std::move(chosen.told);
  }

  // A system without that much would kill the process without a line. A GPU's driver says it. A
  // CPU's two memories are one machine's.
  void check_memory(std::int64_t weight_bytes) {
    if (world_.device().kind() != DeviceKind::cpu) return;
    const PhaseMemory most = largest(plan_.steps);
    const std::int64_t size = world_.size(), here = world_.kind() == WorldKind::local ? size : 1,
                       have = physical_memory_bytes(),
                       rank = std::max(weight_bytes / size,
                                       most.reserved_bytes + most.host_reserved_bytes);
    if (have == 0 || rank <= have / here) return;
    throw OutOfMemory(concat("memory planned: ", mebibytes(rank), " a rank for ", here,
                             here == 1 ? " rank" : " ranks", ", and this machine has ",
                             mebibytes(have),
                             "; make the model or the batch smaller, or use more "
                             "machines"));
  }

  // What rank 0 writes for people, and the metrics, each until it fails. Then the run ends in
  // order, so that the weights are saved before the first failure is thrown.
  template <class F>
  void say(const F& f) {
    attempt(says_, f);
  }
  template <class F>
  void attempt(bool& still, const F& f) {
    if (!speaks_ || !still) return;
    try {
      f();
    } catch (const DeviceError&) {
      still = false;
      if (!output_failure_) output_failure_ = std::current_exception();
    }
  }

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

  void say_line(const std::string& line) {
    say([&] { console_->line(line); });
  }
  // The first sample of a step, in the order of training.
  std::int64_t sample_of(std::int64_t step) const {
    return (checkpoints_ ? checkpoints_->first_sample() : 0) +
           (step - first_step_) * split_batch(config_, world_.size()).global;
  }

  void describe(nn::LanguageModel& model) {
    console_->line(concat("model ", config_.model.name == ModelName::llama ? "llama" : "gpt2",
                          " with ", model.numel(), " parameters on ", world_.size(),
                          world_.size() == 1 ? " rank" : " ranks",
                          world_.device().kind() == DeviceKind::cuda
                              ? concat(" on ", config_.flags.device)
                              : concat(", ", world_.threads(),
                                       world_.threads() == 1 ? " thread" : " threads", " a rank")));
    if (const std::string strategy = describe_strategy(config_, world_.size()); !strategy.empty())
      console_->line(strategy);
    if (world_.kind() == WorldKind::nccl) console_->line(describe_nccl());
    if (world_.kind() == WorldKind::emulated)
      console_->line(concat("emulated: the first of ", world_.size(),
                            " ranks runs without its peers; the wire takes no time, and losses and "
                            "norms, which mean nothing, are not shown"));
    if (inputs_.loader)
      console_->line(concat("data ", config_.data.path, ": ", inputs_.loader->samples(),
                            " samples of ", config_.training.seq_len, " tokens to train on, ",
                            inputs_.loader->heldout_samples(), " held out"));
    console_->line(concat("memory planned: ", mebibytes(plan_.steps.back().peak_bytes),
                          " a rank at the peak of a step"));
    if (!chosen_.empty()) console_->line(chosen_);
  }

  // Which of its ways NCCL was given.
  std::string describe_nccl() const {
    const NcclOptions options = nccl_options(config_);
    return concat("NCCL: ", options.windows ? "windows" : "no windows",
                  options.gather_policy == GatherPolicy::zero
                      ? ", gathers by copy engines where it can"
                      : ", gathers as it wants",
                  options.reduce_max_ctas > 0
                      ? concat(", reductions with at most ", options.reduce_max_ctas, " CTAs")
                      : ", reductions with as many CTAs as it wants",
                  options.ordered_sums ? ", all sums in rank order" : "");
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
        return trainer_->step(step, fill, requested_signal() != 0 || output_failure_,
                              checkpoints_ ? checkpoints_->term() : 0);
      });
      if (step + 1 == std::min(config_.training.steps, first_step_ + StepTrace::kSteps) ||
          result.stop || result.diverged)
        trace.finish();
      const PhaseMemory planned = plan_.of_step(step - first_step_), used = result.memory;
      if (!off_plan_ && used != planned) off_plan_ = {step, used};
      // The largest of all ranks; report() names the numbers. An emulated rank counts for its
      // peers.
      std::array<double, 5> largest = {
          result.exposed_seconds, result.host_seconds, static_cast<double>(used.peak_bytes),
          static_cast<double>(planned.peak_bytes), static_cast<double>(used.reserved_bytes)};
      world_.max(largest);
      const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
      steps_done_ = step + 1;
      peak_ = std::max(peak_, bytes_of(largest[2]));
      host_peak_ = std::max(host_peak_, used.host_peak_bytes);
      report(step, result, largest, tokens / wall.count(), flops);
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

  void report(std::int64_t step, const StepResult& result, const std::array<double, 5>& largest,
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
    const auto& [exposed_seconds, host_seconds, peak, planned, reserved] = largest;
    if (exposed_seconds >= 0) m.exposed_comm_ms = exposed_seconds * 1e3;
    if (host_seconds >= 0) m.host_ms = host_seconds * 1e3;
    m.memory_peak_bytes = bytes_of(peak);
    m.memory_planned_bytes = bytes_of(planned);
    m.memory_reserved_bytes = bytes_of(reserved);
    attempt(measures_, [&] {
      if (inputs_.jsonl) inputs_.jsonl->write(m);
    });
    say([&] { console_->step(m); });
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
    say([&] { console_->validation(step, loss); });
    const PhaseMemory now = trainer_->phase_memory();
    evaluation_ = {std::max(evaluation_.peak_bytes, now.peak_bytes), now.reserved_bytes,
                   std::max(evaluation_.host_peak_bytes, now.host_peak_bytes),
                   now.host_reserved_bytes};
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
    if (steps_done_ > first_step_) report_phase("the save", plan_.save, trainer_->phase_memory());
    return "the weights before it are saved";
  }

  // Collective. Of the largest rank, and on how many each number is that of the rank's own plan.
  void report_phase(std::string_view phase, const PhaseMemory& planned, const PhaseMemory& used) {
    double most[] = {static_cast<double>(planned.peak_bytes), static_cast<double>(used.peak_bytes),
                     static_cast<double>(planned.reserved_bytes),
                     static_cast<double>(used.reserved_bytes)};
    world_.max(most);
    const std::string equal = equal_ranks(planned == used);
    say([&] {
      console_->line(concat("memory a rank in ", phase, ": planned peak ", bytes_of(most[0]),
                            " bytes, used ", bytes_of(most[1]), " bytes; planned reserve ",
                            bytes_of(most[2]), " bytes, used ", bytes_of(most[3]), " bytes; ",
                            equal));
    });
  }

  // Collective.
  void report_memory() {
    const std::string equal = equal_ranks(!off_plan_);
    const PhaseMemory own = plan_.of_steps(steps_done_ - first_step_);
    const std::int64_t planned = bytes_of(world_.max(static_cast<double>(own.peak_bytes)));
    say([&] {
      console_->line(concat("memory a rank: planned peak ", planned, " bytes, used ", peak_,
                            " bytes (", mebibytes(peak_), ")",
                            planned == peak_ ? ", as planned; " : "; ", equal));
    });
    if (world_.kind() == WorldKind::nccl) report_nccl();
    const auto never = static_cast<double>(steps_done_);
    const double first = -world_.max(off_plan_ ? -static_cast<double>(off_plan_->step) : -never);
    if (first < never) {
      const auto step = static_cast<std::int64_t>(first);
      const PhaseMemory here = plan_.of_step(step - first_step_);
      report_phase(concat("step ", step + 1, ", the first that was not as planned"), here,
                   off_plan_ && off_plan_->step == step ? off_plan_->used : here);
    }
    if (config_.training.captured_step)
      say([&] { console_->line(trainer_->captured_steps(steps_done_)); });
    if (!config_.training.enable_cpu_offload && !config_.checkpoint.stages()) return;
    const std::int64_t most[] = {bytes_of(world_.max(static_cast<double>(own.host_peak_bytes))),
                                 bytes_of(world_.max(static_cast<double>(host_peak_)))};
    say([&] {
      console_->line(concat("on the host: planned peak ", most[0], " bytes, used ", most[1],
                            " bytes (", mebibytes(most[1]), ")"));
    });
  }
  // Collective. On top of what is planned.
  void report_nccl() {
    const double own =
        static_cast<double>(trainer_->memory().ledger().outside_bytes(comm::kMeasuredNccl));
    const std::int64_t measured = bytes_of(world_.max(own));
    say([&] {
      console_->line(concat("memory of NCCL's communicators, on top: measured ", measured,
                            " bytes a rank (", mebibytes(measured), "), assumed ", plan_.nccl_bytes,
                            " bytes (", mebibytes(plan_.nccl_bytes), ")"));
    });
  }
  std::string equal_ranks(bool is_mine_equal) {
    return concat(static_cast<std::int64_t>(world_.sum(is_mine_equal)), " of ", world_.size(),
                  " ranks as in their plans");
  }

  void sample(nn::LanguageModel& model) {
    std::vector<std::int32_t> text;
    for (const char c : config_.flags.sample) text.push_back(static_cast<unsigned char>(c));
    // What comes behind max_seq_len tokens continues the last half of so many.
    const auto most = static_cast<std::size_t>(model.max_seq_len());
    const std::size_t end = text.size() + static_cast<std::size_t>(config_.flags.sample_tokens);
    while (text.size() < end) {
      const std::size_t context = text.size() < most ? text.size() : (most + 1) / 2,
                        count = std::min(end - text.size(), most - context + 1);
      const std::vector<std::int32_t> more =
          nn::generate(model, std::span(text).last(context), static_cast<std::int64_t>(count),
                       {.temperature = 0.8,
                        .top_k = 40,
                        .seed = static_cast<std::uint64_t>(config_.debug.seed) + text.size()});
      text.insert(text.end(), more.begin(), more.end());
    }
    if (!speaks_) return;
    std::string bytes;
    for (const std::int32_t t : text) bytes += static_cast<char>(t);
    console_->line(as_utf8(bytes));
  }

  Config config_;  // with what was chosen
  Inputs& inputs_;
  const World& world_;
  TraceFile* traces_;  // null without --trace
  bool speaks_;
  MemoryPlan plan_;
  std::string chosen_;  // how, where there was a choice
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<Console> console_;
  // Folders may have any name.
  const RunCheckpoints::Say lines_ = [this](const std::string& line) { say_line(printable(line)); };
  std::unique_ptr<RunCheckpoints> checkpoints_;  // null without checkpoint.enable
  std::int64_t first_step_ = 0;                  // which is the first that this run takes
  bool says_ = true, measures_ = true;           // neither stdout nor metrics.jsonl has failed
  std::exception_ptr output_failure_;            // on rank 0, the first
  std::exception_ptr save_failure_;              // of a checkpoint, on all ranks
  std::int64_t steps_done_ = 0;
  std::int64_t peak_ = 0, host_peak_ = 0;
  bool diverged_ = false;   // in step steps_done_
  std::string not_finite_;  // there
  bool is_saved_ = true;    // or nothing was to be
  // On this rank, the first step that was not as planned, live or reserved.
  struct OffPlan {
    std::int64_t step;
    PhaseMemory used;
  };
  std::optional<OffPlan> off_plan_;
  PhaseMemory evaluation_;
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
  const Watchdog watchdog(options.timeout_seconds, [&records] {
    records.write_all("a thread hangs");
    const int signal = requested_signal();
    return signal != 0 ? 128 + signal : 1;
  });
  if (config.flags.emulate)
    rank(World::emulated(0, ranks, options));
  else
    run_ranks(environment, threads, options, rank);
  return code;
}

}  // namespace tessera::train
