#include "tools/train/dry_run.hpp"

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/optim/matrix_owners.hpp"
#include "tessera/device/workers.hpp"
#include "tools/train/memory_choice.hpp"
#include "tools/train/memory_plan.hpp"
#include "tools/train/recompute_choices.hpp"

namespace tessera::train {
namespace {

// What Muon orthogonalises, and which rank of a shard group each matrix is dealt to; nothing
// without Muon.
struct Dealt {
  int ranks = 1;
  std::vector<optim::MatrixSize> sizes{};
  optim::MatrixPlan plan{};

  std::vector<optim::MatrixSize> of(int rank) const {
    return optim::matrices_of(plan, sizes, rank);
  }
};

Dealt deal_matrices(const Config& config, const std::vector<Parameter>& parameters, int ranks) {
  Dealt dealt{.ranks = ranks};
  if (config.optimizer.name != OptimizerName::muon) return dealt;
  for (const Parameter& p : optim::split_for_muon(parameters).matrices)
    dealt.sizes.push_back({.rows = p.shape()[0], .columns = p.shape()[1], .parts = p.row_parts()});
  dealt.plan = optim::plan_matrices(dealt.sizes, ranks, config.optimizer.muon().turn_bytes);
  return dealt;
}

// One line: the owners, rank by rank where that can be read, and what travels.
std::string describe(const Dealt& dealt) {
  constexpr int kShown = 16;
  std::size_t least = dealt.sizes.size(), most = 0;
  std::string counts;
  for (int rank = 0; rank < dealt.ranks; ++rank) {
    const std::size_t count = dealt.of(rank).size();
    least = std::min(least, count), most = std::max(most, count);
    counts += concat(rank > 0 ? ", " : "", count);
  }
  if (dealt.ranks > kShown) counts = concat(least, " to ", most, " each");
  return concat("Muon: ", dealt.sizes.size(), " matrices in ", dealt.plan.widths.size(),
                dealt.plan.widths.size() == 1 ? " turn" : " turns",
                ", owned by ranks of a shard group: ", counts, "; by all-to-all a rank sends ",
                optim::sent_bytes(dealt.plan, dealt.ranks),
                " bytes a step, and receives as many\n");
}

std::string describe_reductions(const Config& config, int ranks) {
  const std::int64_t micro_batches = split_batch(config, ranks).micro_batches;
  const GradientSync sync = apply_strategy(config, ranks).parallelism.fsdp_gradient_sync;
  return concat(micro_batches, micro_batches == 1 ? " micro-batch" : " micro-batches",
                " a step, gradients reduced after ",
                sync == GradientSync::last ? "the last, of tables in slices after each" : "each",
                sync == GradientSync::all_reduce_last ? ", over replicas after the last\n" : "\n");
}

// How many of the matrices that a parameter stacks have rows in a shard: Muon's tables list each.
std::int64_t parts_in(const Parameter& p, const RowRange& rows) {
  std::int64_t begin = 0, count = 0;
  for (const RowPart& part : p.row_parts()) {
    count += begin < rows.end && begin + part.rows > rows.begin ? 1 : 0;
    begin += part.rows;
  }
  return count;
}

// Ranks whose shards have the same sizes, and who orthogonalise matrices of the same sizes, need
// the same memory: one of each kind, with how many there are.
std::map<int, int> distinct_layouts(const Config& config, int ranks) {
  const auto model = make_model(config);
  const int shards = mesh_sizes(config, ranks).shard;
  std::map<std::vector<std::int64_t>, int> first;
  std::map<int, int> counts;
  const std::vector<Parameter> parameters = model->parameters();
  const Dealt dealt = deal_matrices(config, parameters, shards);
  std::vector<std::vector<std::int64_t>> owned(static_cast<std::size_t>(shards));
  for (int rank = 0; rank < shards; ++rank)
    for (const optim::MatrixSize& size : dealt.of(rank)) {
      std::vector<std::int64_t>& sizes = owned[static_cast<std::size_t>(rank)];
      sizes.insert(sizes.end(), {size.rows, size.columns});
      for (const RowPart& part : size.parts) sizes.push_back(part.rows);
    }
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::int64_t> rows = owned[static_cast<std::size_t>(rank % shards)];
    for (const Parameter& p : parameters) {
      const RowRange own = ShardSpec{p.shape(), shards, rank % shards}.owned();
      rows.push_back(own.size());
      if (!dealt.sizes.empty()) rows.push_back(parts_in(p, own));
    }
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
  const std::optional<Machine> machine = priced_machine(given);
  std::string chosen;
  Config config = given;
  const std::optional<std::int64_t> limit =
      given.memory.limit || !machine ? given.memory.limit : machine->memory_bytes;
  if (limit) {
    const auto largest = [&](const Config& way) {  // over the kinds of ranks
      MemoryPlan most;
      for (const auto& [rank, count] : distinct_layouts(way, ranks))
        if (MemoryPlan plan = plan_memory(way, rank, ranks);
            reserved_bytes(plan) > reserved_bytes(most))
          most = std::move(plan);
      return most;
    };
    try {
      Chosen of = choose_by_memory(given, limit, largest, [](double x) { return x; });
      config = std::move(of.config);
      chosen = std::move(of.told);
    } catch (const OutOfMemory& error) {
      if (given.memory.limit) throw;
      chosen = error.what();  // what it would need is told all the same
      if (config.training.loss == LossChoice::automatic) config.training.loss = LossChoice::lean;
    }
  }
  std::optional<TraceFile> traces;
  if (!config.flags.trace.empty()) traces.emplace(config.flags.trace);
  const auto model = make_model(config);
  std::printf("model %lld parameters, %s of f32\n", static_cast<long long>(model->numel()),
              mebibytes(4 * model->numel()).c_str());
  if (const std::string strategy = describe_strategy(config, ranks); !strategy.empty())
    std::printf("%s\n", strategy.c_str());
  if (!chosen.empty()) std::printf("%s\n", chosen.c_str());
  std::printf("%s", describe_reductions(config, ranks).c_str());
  if (config.optimizer.name == OptimizerName::muon)
    std::printf(
        "%s", describe(deal_matrices(config, model->parameters(), mesh_sizes(config, ranks).shard))
                  .c_str());
  if (config.training.loss == LossChoice::automatic)
    std::printf(
        "training.loss=lean, because without a memory.limit nothing else is known to fit\n");
  std::fflush(stdout);  // the plan may take its time
  const BatchSplit split = split_batch(config, ranks);
  const std::int64_t tokens = split.global / ranks * config.training.seq_len;  // of a rank
  const PricedStep step{.machine = machine ? &*machine : nullptr,
                        .ranks = ranks,
                        .tokens = static_cast<double>(tokens),
                        .flops_per_token = flops_per_token(config, *model)};
  std::optional<MemoryPlan> of_rank_0;
  for (const auto& [rank, count] : distinct_layouts(config, ranks)) {
    const MemoryPlan plan = plan_memory(config, rank, ranks, traces ? &*traces : nullptr);
    const PhaseMemory first = plan.steps.front(), later = largest(std::span(plan.steps).subspan(1));
    if (!of_rank_0) {
      of_rank_0 = plan;
      std::printf("%s", plan.shard.to_string().c_str());
    }
    std::printf(
        "rank %d and %d other ranks like it: planned peak %lld bytes (%s) in step 1, %lld bytes "
        "(%s) at most in a later step, reserved %lld bytes (%s)\n",
        rank, count - 1, static_cast<long long>(first.peak_bytes),
        mebibytes(first.peak_bytes).c_str(), static_cast<long long>(later.peak_bytes),
        mebibytes(later.peak_bytes).c_str(), static_cast<long long>(later.reserved_bytes),
        mebibytes(later.reserved_bytes).c_str());
    std::printf(
        "in evaluation: %lld bytes at the peak; in a save: %lld bytes; reserved after step 1: %lld "
        "bytes, evaluation: %lld bytes, a save: %lld bytes\n",
        static_cast<long long>(plan.evaluation.peak_bytes),
        static_cast<long long>(plan.save.peak_bytes), static_cast<long long>(first.reserved_bytes),
        static_cast<long long>(plan.evaluation.reserved_bytes),
        static_cast<long long>(plan.save.reserved_bytes));
    if (later.host_peak_bytes > 0)
      std::printf(
          "on the host: planned peak %lld bytes (%s) in step 1, %lld bytes at most in a later "
          "step, reserved %lld bytes (%s)\n",
          static_cast<long long>(first.host_peak_bytes), mebibytes(first.host_peak_bytes).c_str(),
          static_cast<long long>(later.host_peak_bytes),
          static_cast<long long>(later.host_reserved_bytes),
          mebibytes(later.host_reserved_bytes).c_str());
    std::printf("%s\n", plan.ledger.c_str());
    if (machine) std::printf("%s", describe(plan.price, step).c_str());
  }
  std::printf("%s", compare_recompute(config, ranks, *of_rank_0).c_str());
  if (device_choice(config).kind == DeviceKind::cpu)
    std::printf("on top, with any model: %s of scratch for each thread that runs kernels\n",
                mebibytes(kScratchBytes).c_str());
  if (of_rank_0->nccl_bytes > 0)
    std::printf(
        "on top, where ranks are processes with a GPU each: %s of NCCL's communicators, assumed; a "
        "run measures it\n",
        mebibytes(of_rank_0->nccl_bytes).c_str());
  if (traces) traces->write();
  if (std::fflush(stdout) != 0 || std::ferror(stdout))
    throw DeviceError("writing to stdout failed");
  return 0;
}

}  // namespace tessera::train
