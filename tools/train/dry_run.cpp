#include "tools/train/dry_run.hpp"

#include <cstdio>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/optim/matrix_owners.hpp"
#include "tessera/device/workers.hpp"
#include "tools/train/memory_choice.hpp"
#include "tools/train/recompute_choices.hpp"
#include "tools/train/trainer.hpp"

namespace tessera::train {
namespace {

// Of each rank of a shard group, the sizes of the matrices that it orthogonalises, one behind the
// other; empty ones without Muon.
std::vector<std::vector<std::int64_t>> matrices_of_ranks(const Config& config,
                                                         const std::vector<Parameter>& parameters,
                                                         int ranks) {
  std::vector<std::vector<std::int64_t>> owned(static_cast<std::size_t>(ranks));
  if (config.optimizer.name != OptimizerName::muon) return owned;
  std::vector<optim::MatrixSize> sizes;
  for (const Parameter& p : optim::split_for_muon(parameters).matrices)
    sizes.push_back({p.shape()[0], p.shape()[1]});
  const optim::MatrixPlan plan =
      optim::plan_matrices(sizes, ranks, config.optimizer.muon().turn_bytes);
  for (std::size_t rank = 0; rank < owned.size(); ++rank)
    for (const optim::MatrixSize& size : optim::matrices_of(plan, sizes, static_cast<int>(rank)))
      owned[rank].insert(owned[rank].end(), {size.rows, size.columns});
  return owned;
}

// Ranks whose shards have the same sizes, and who orthogonalise matrices of the same sizes, need
// the same memory: one of each kind, with how many there are.
std::map<int, int> distinct_layouts(const Config& config, int ranks) {
  const auto model = make_model(config);
  const int shards = mesh_sizes(config, ranks).shard;
  std::map<std::vector<std::int64_t>, int> first;
  std::map<int, int> counts;
  const std::vector<Parameter> parameters = model->parameters();
  const auto owned = matrices_of_ranks(config, parameters, shards);
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::int64_t> rows = owned[static_cast<std::size_t>(rank % shards)];
    for (const Parameter& p : parameters)
      rows.push_back(ShardSpec{p.shape(), shards, rank % shards}.owned().size());
    ++counts[first.try_emplace(std::move(rows), rank).first->second];
  }
  return counts;
}

}  // namespace

std::string mebibytes(std::int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

int dry_run(const Config& given, int ranks) {
  std::string chosen;
  Config config = given;
  if (given.memory.limit) {
    const auto largest = [&](const Config& way) {  // over the kinds of ranks
      MemoryPlan most;
      for (const auto& [rank, count] : distinct_layouts(way, ranks))
        if (MemoryPlan plan = plan_memory(way, rank, ranks);
            reserved_bytes(plan) > reserved_bytes(most))
          most = std::move(plan);
      return most;
    };
    Chosen of = choose_by_memory(given, given.memory.limit, largest, [](double x) { return x; });
    config = std::move(of.config);
    chosen = std::move(of.told);
  }
  std::optional<TraceFile> traces;
  if (!config.flags.trace.empty()) traces.emplace(config.flags.trace);
  const auto model = make_model(config);
  std::printf("model %lld parameters, %s of f32\n", static_cast<long long>(model->numel()),
              mebibytes(4 * model->numel()).c_str());
  if (const std::string strategy = describe_strategy(config, ranks); !strategy.empty())
    std::printf("%s\n", strategy.c_str());
  if (!chosen.empty()) std::printf("%s\n", chosen.c_str());
  if (config.training.loss == LossChoice::automatic)
    std::printf("training.loss=lean, as without a memory.limit nothing else is known to fit\n");
  std::fflush(stdout);  // the plan may take its time
  const std::optional<Machine> machine = priced_machine(config);
  const BatchSplit split = split_batch(config, ranks);
  const std::int64_t tokens = split.global / ranks * config.training.seq_len;  // of a rank
  const PricedStep step{.machine = machine ? &*machine : nullptr,
                        .ranks = ranks,
                        .tokens = static_cast<double>(tokens),
                        .flops_per_token = flops_per_token(config, *model)};
  std::optional<MemoryPlan> of_rank_0;
  for (const auto& [rank, count] : distinct_layouts(config, ranks)) {
    const MemoryPlan plan = plan_memory(config, rank, ranks, traces ? &*traces : nullptr);
    if (!of_rank_0) {
      of_rank_0 = plan;
      std::printf("%s", plan.shard.to_string().c_str());
    }
    std::printf(
        "rank %d and %d like it: planned peak %lld bytes (%s) in step 1, %lld bytes (%s) in every "
        "later step, reserved %lld bytes (%s)\n",
        rank, count - 1, static_cast<long long>(plan.first_step.peak_bytes),
        mebibytes(plan.first_step.peak_bytes).c_str(),
        static_cast<long long>(plan.steady_step.peak_bytes),
        mebibytes(plan.steady_step.peak_bytes).c_str(),
        static_cast<long long>(plan.steady_step.reserved_bytes),
        mebibytes(plan.steady_step.reserved_bytes).c_str());
    std::printf(
        "in evaluation: %lld bytes at the peak; in a save: %lld bytes; reserved after step 1: %lld "
        "bytes, evaluation: %lld bytes, a save: %lld bytes\n",
        static_cast<long long>(plan.evaluation.peak_bytes),
        static_cast<long long>(plan.save.peak_bytes),
        static_cast<long long>(plan.first_step.reserved_bytes),
        static_cast<long long>(plan.evaluation.reserved_bytes),
        static_cast<long long>(plan.save.reserved_bytes));
    if (plan.steady_step.host_peak_bytes > 0)
      std::printf(
          "on the host: planned peak %lld bytes (%s) in step 1, %lld bytes in every later step, "
          "reserved %lld bytes (%s)\n",
          static_cast<long long>(plan.first_step.host_peak_bytes),
          mebibytes(plan.first_step.host_peak_bytes).c_str(),
          static_cast<long long>(plan.steady_step.host_peak_bytes),
          static_cast<long long>(plan.steady_step.host_reserved_bytes),
          mebibytes(plan.steady_step.host_reserved_bytes).c_str());
    std::printf("%s\n", plan.ledger.c_str());
    if (machine) std::printf("%s", describe(plan.price, step).c_str());
  }
  std::printf("%s", compare_recompute(config, ranks, *of_rank_0).c_str());
  if (device_choice(config).kind == DeviceKind::cpu)
    std::printf("beside it, whatever the model: %s of scratch for each thread that runs kernels\n",
                mebibytes(kScratchBytes).c_str());
  if (traces) traces->write();
  if (std::fflush(stdout) != 0 || std::ferror(stdout))
    throw DeviceError("writing to stdout failed");
  return 0;
}

}  // namespace tessera::train
