#include "tools/train/memory_plan.hpp"

#include <algorithm>
#include <utility>

#include "runtime/comm/planned_nccl.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/checkpoint/saver.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::train {

CostModel planned_machine(const Config& config) {
  return {.flops_per_second = config.metrics.peak_tflops.value_or(0.05) * 1e12,
          .bytes_per_second = 10e9,
          .launch_seconds = 1e-6,
          .wire_latency_seconds = 20e-6,
          .wire_bytes_per_second = 10e9};
}

std::optional<Machine> priced_machine(const Config& config) {
  const Config::Flags& flags = config.flags;
  if (flags.machine == MachineName::none) return std::nullopt;
  Machine machine = kMachines.at(static_cast<std::size_t>(flags.machine) - 1);
  if (flags.gpus_per_machine) machine.gpus = static_cast<int>(*flags.gpus_per_machine);
  machine.efficiency = flags.machine_efficiency;
  machine.wire = flags.machine_wire;
  return machine;
}

namespace {

// Far more than plans of slots take to come to rest.
constexpr std::int64_t kMostPlannedSteps = 16;

// Adds up the work of a plan's operations.
class WorkCounter final : public Observer {
 public:
  explicit WorkCounter(DeviceContext& device) : device_(device) { device.add_observer(*this); }
  ~WorkCounter() override { device_.remove_observer(*this); }
  WorkCounter(const WorkCounter&) = delete;
  WorkCounter& operator=(const WorkCounter&) = delete;

  void launched(StreamId stream, Tick, const Op& op) override {
    if (stream != StreamId::compute) return;
    flops += op.cost.flops;
    moved_bytes += op.cost.bytes;
  }
  double flops = 0, moved_bytes = 0;

 private:
  DeviceContext& device_;
};

}  // namespace

PhaseMemory MemoryPlan::of_step(std::int64_t step) const {
  if (steps.empty()) return {};
  auto at = static_cast<std::size_t>(step);
  if (step < evaluates_after)
    at = std::min(at, steps_before_evaluation - 1);
  else if (evaluates_after > 0)
    at = steps_before_evaluation + at - static_cast<std::size_t>(evaluates_after);
  return steps[std::min(at, steps.size() - 1)];
}
PhaseMemory MemoryPlan::of_steps(std::int64_t count) const {
  std::vector<PhaseMemory> all;
  for (std::int64_t step = 0; step < std::min(count, evaluates_after + std::ssize(steps)); ++step)
    all.push_back(of_step(step));
  return largest(all);
}

MemoryPlan plan_memory(const Config& config, int rank, int ranks, TraceFile* traces,
                       std::int64_t heldout_batches) {
  const std::optional<Machine> machine = priced_machine(config);  // outlives the device
  CostModel cost = planned_machine(config);
  cost.machine = machine ? &*machine : nullptr;
  const World world = World::emulated(rank, ranks,
                                      {.device = device_choice(config),
                                       .executor = ExecutorKind::virtual_,
                                       .threads = 1,
                                       .cost = cost,
                                       .nccl = nccl_options(config)});
  std::optional<StepPricer> pricer;
  if (machine) pricer.emplace(world, *machine);
  Trainer trainer(config, world);
  nn::init(trainer.model(), {static_cast<std::uint64_t>(config.debug.seed)});
  std::optional<checkpoint::Saver> saver;  // for its memory
  if (config.checkpoint.stages())
    saver.emplace(config.checkpoint.folder, world).prepare(trainer.parts());
  const FillBatch nothing = [](std::int64_t, std::int64_t, std::span<std::int32_t>,
                               std::span<std::int32_t>) {};
  MemoryPlan plan;
  StepTrace trace(traces, world, StepTrace::Of::plan);
  const auto evaluate = [&] {
    trainer.reset_peaks();
    trainer.heldout_loss(split_batch(config, ranks).local * ranks * heldout_batches,
                         [](std::int64_t, std::span<std::int32_t>, std::span<std::int32_t>) {});
    const PhaseMemory now = trainer.phase_memory();
    plan.evaluation = {std::max(plan.evaluation.peak_bytes, now.peak_bytes), now.reserved_bytes,
                       std::max(plan.evaluation.host_peak_bytes, now.host_peak_bytes),
                       now.host_reserved_bytes};
  };
  if (config.data.heldout > 0) plan.evaluates_after = config.validation.freq;
  const auto is_to_come = [&] {
    return plan.evaluates_after > 0 && plan.steps_before_evaluation == 0;
  };
  std::uint64_t made = 0;
  bool ends_with_evaluation = false;
  int alike = 0;  // steps without a new plan; that of a step's last pass is made in the next
  for (std::int64_t step = 0; (alike < 2 || is_to_come()) && step < 2 * kMostPlannedSteps; ++step) {
    if (pricer) pricer->begin();
    const WorkCounter work(world.device().context());
    const StepResult done = trace.during(step, [&] { return trainer.step(step, nothing, false); });
    plan.steps.push_back(done.memory);
    const std::uint64_t now = shard_counters(trainer.model()).slot_plans;
    alike = std::exchange(made, now) == now ? alike + 1 : 0;
    plan.flops = work.flops;
    plan.moved_bytes = work.moved_bytes;
    if (pricer) plan.price = pricer->end();
    const bool rests = alike == 2 || step + 1 == kMostPlannedSteps;
    ends_with_evaluation = plan.evaluates_after > 0 &&
                           ((step + 1) % plan.evaluates_after == 0 || (is_to_come() && rests));
    if (!ends_with_evaluation) continue;
    if (is_to_come()) {
      plan.steps_before_evaluation = plan.steps.size();
      alike = 0;
    }
    evaluate();
  }
  pricer.reset();
  trace.finish();
  plan.ledger = trainer.memory().ledger().table();
  plan.nccl_bytes = trainer.memory().ledger().outside_bytes(comm::kAssumedNccl);
  if (trainer.memory().has_host())
    plan.ledger += "\non the host\n" + trainer.memory().host().ledger().table();
  plan.shard = shard_plan(trainer.model());
  if (!ends_with_evaluation) evaluate();
  trainer.reset_peaks();
  checkpoint::for_each_saved_tensor(
      trainer.model(), world, [](const std::string&, const Tensor& full) { full.plan_to_bytes(); },
      {.dtype = config.checkpoint.export_dtype});
  plan.save = trainer.phase_memory();
  return plan;
}

}  // namespace tessera::train
