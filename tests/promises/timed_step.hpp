// A step of a Llama on the virtual clock, where it takes what its operations take and not what this
// machine does, in any cell and on a wire as fast as one likes.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/device/device_context.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tests/promises/longest_path.hpp"
#include "tests/promises/support.hpp"

namespace tessera::testing {

// A steady step of rank 1 of 8, and the computed minimum of longest_path.hpp.
struct TimedStep {
  std::vector<Operation> operations;
  double seconds = 0, minimum = 0;
  double compute = 0, wire = 0;  // busy, without the optimizer
  ShardPlan plan;

  // The operations of `stream` whose name has `kind` in it, in their order.
  std::vector<std::size_t> all(StreamId stream, std::string_view kind) const {
    std::vector<std::size_t> out;
    for (std::size_t i = 0; i < operations.size(); ++i)
      if (operations[i].stream == stream && operations[i].is(kind)) out.push_back(i);
    return out;
  }
  // When the shard is cast into the slot, before the all-gather.
  double begin_of_gather(std::size_t gather) const { return operations[gather - 1].begin; }
  // The first operation of compute after `gather` that reads what it gathered.
  const Operation& first_reader(std::size_t gather) const {
    return *std::find_if(operations.begin() + static_cast<std::ptrdiff_t>(gather) + 1,
                         operations.end(), [&](const Operation& op) {
                           return op.stream == StreamId::compute &&
                                  overlap(op.reads, operations[gather].writes);
                         });
  }
  // When compute began to fill the gradient buffer of `reduction`: after its memory was last
  // reduced.
  double filled_from(std::size_t reduction) const {
    double from = operations[reduction].begin;
    for (std::size_t i = reduction; i-- > 0;) {
      const Operation& op = operations[i];
      if (op.stream == StreamId::reduce && overlap(op.reads, operations[reduction].reads) &&
          !op.is("complete_gradient_piece") && !op.is("pack_chunks"))  // of the same reduction
        break;
      if (op.stream == StreamId::compute && overlap(op.writes, operations[reduction].reads))
        from = op.begin;
    }
    return from;
  }
  // The time between `from` and `to` for which compute is idle.
  double idle(double from, double to) const {
    double at = from, sum = 0;
    for (const Operation& op : operations) {
      if (op.stream != StreamId::compute || op.end <= at) continue;
      sum += std::max(0., std::min(op.begin, to) - at);
      at = op.end;
      if (at >= to) return sum;
    }
    return sum + to - at;
  }
};

// Eight blocks of equal size; embedding and head are no larger than one.
inline constexpr nn::LlamaConfig kTimedModel{.dim = 512,
                                             .n_layers = 8,
                                             .n_heads = 8,
                                             .ffn_dim = 1408,
                                             .vocab_size = 4096,
                                             .max_seq_len = 1024};

inline constexpr std::int64_t kWhole = 1 << 30, kMatrix = 1 << 20;  // pieces of gradient buffers

// Whether decisions.hpp opens and closes units around each forward.
enum class Opens : std::uint8_t { by_calls, by_hand };

// Of a grid of several groups of 8 ranks that of the first one, in replicas or not.
inline DeviceMesh mesh_of_group(const World& world, int groups, int replicas) {
  const DeviceMesh grid = DeviceMesh::grid(
      world, {{.name = "group", .size = groups},
              {.name = "replicas", .size = replicas, .streams = {.reduce = StreamId::replicate}},
              {.name = "shards", .size = 8 / replicas}});
  return replicas == 1 ? grid["shards"] : grid.select({"replicas", "shards"});
}

// With several `groups`, in a world of as many such runs.
inline TimedStep run_timed(const Cell& cell, const CostModel& cost,
                           std::int64_t piece_bytes = kWhole, Opens opens = Opens::by_calls,
                           int groups = 1) {
  const RaceCheck check;
  const World world =
      World::emulated(1, 8 * groups, check({.executor = ExecutorKind::virtual_, .cost = cost}));
  nn::LlamaConfig config = kTimedModel;
  config.tie_embeddings = cell.tied;
  config.recompute = recompute_of(cell);
  nn::Llama model(config, Device::meta());
  if (cell.freezes) freeze_parts(model);
  std::vector<Parameter> gains, ignored;
  if (cell.stored) gains = add_bases(model, *cell.stored);
  if (cell.ignores) ignored = gains;
  if (cell.encodes)
    for (const Parameter& p : model.parameters())
      if (p.shape().ndim() == 2) p.set_gather_transform(gather_in_e4m3());
  if (cell.ragged)
    for (const auto& block : model.blocks)
      for (const Parameter& p : block.parameters())
        if (p.shape().ndim() == 2) p.set_block_rows(5);
  ShardOptions options{
      .mesh = groups == 1 ? mesh_of(world, cell.replicas, cell.backwards)
                          : mesh_of_group(world, groups, cell.replicas),
      .precision = {.param = cell.param, .reduce = cell.reduce, .output = cell.output},
      .reshard_after_forward = cell.reshard,
      .prefetch_depth = cell.prefetch_depth,
      .reductions_in_flight = cell.reductions_in_flight,
      .piece_bytes = piece_bytes,
      .offload = cell.offload,
      .ignored = ignored};
  if (cell.by_hand) options.shard_placement_fn = by_columns(options.mesh);
  if (cell.inner) add_inner_units(model, options);
  if (cell.lists) list_blocks(model, options);
  ShardOptions of_last = options;  // which gives what the root's norm takes
  of_last.precision.output.reset();
  for (nn::Module* part : model.parts())
    if (!part->hook())
      fully_shard(*part, part == &model.blocks[model.blocks.size() - 1] ? of_last : options);
  shard_around(model, options, cell.roots);
  if (cell.by_hand) decide_by_hand(model, world);
  model.materialize(world.device());
  const auto [matrices, others] = optim::split_for_muon(model.parameters());
  std::unique_ptr<optim::Optimizer> optimizer;
  if (cell.orthogonalises)
    optimizer = std::make_unique<optim::Muon>(matrices, others);
  else
    optimizer = std::make_unique<optim::AdamW>(model.parameters(), optim::AdamWOptions());
  optimizer->prepare();
  std::optional<optim::GradScaler> scaler;
  if (cell.scales_loss) scaler.emplace(world.device());
  const std::vector<std::int32_t> tokens(4096);
  TimedStep step;
  // The last step is a steady one: slots are planned once for each way.
  for (int k = 0; k < (cell.changes ? 4 : 2); ++k) {
    world.device().synchronize();
    Executor& executor = world.device().context().executor();
    const double start = executor.host_seconds();
    Recorder recorder(world.device(), cost);
    if (cell.changes) change_before_step(model, k);
    for (int m = 0; m < cell.micro_batches; ++m) {
      const auto batch = [&] { return Tensor::from(tokens, {4, 1024}, world.device()); };
      begin_micro_batch(model, cell.accumulation, m + 1 == cell.micro_batches);
      if (opens == Opens::by_hand && k > 0) decide_before_forward(model);
      const Tensor loss = model.loss(batch(), batch());
      if (opens == Opens::by_hand) decide_before_backward(model);
      (scaler ? scaler->scale(loss) : loss).backward();
    }
    // One by one, and so by all_reduce: little of the wire is theirs.
    for (const Parameter& p : ignored) average({p}, world);
    if (scaler) scaler->unscale(*optimizer);
    optim::clip_grad_norm(model.parameters(), 1.0);
    scaler ? scaler->step(*optimizer) : optimizer->step();
    if (scaler) scaler->update();
    optimizer->zero_grad();
    world.device().synchronize();
    step.operations = std::move(recorder.operations);
    for (Operation& op : step.operations) op.begin -= start, op.end -= start;
    step.seconds = executor.host_seconds() - start;
  }
  const bool is_bound =
      cell.micro_batches > 1 || cell.lists || cell.freezes || opens == Opens::by_hand;
  step.minimum =
      longest_path(step.operations, is_bound ? MemoryIs::as_planned : MemoryIs::unlimited);
  for (const Operation& op : step.operations)
    (op.stream == StreamId::compute ? step.compute : step.wire) += op.seconds;
  step.plan = shard_plan(*roots_of(model).front());
  return step;
}

// Compute of 1 PFLOP/s beside memory that is as fast as an accelerator's is to its products, and a
// wire for which the collectives of a step take `ratio` times as long as its compute.
inline CostModel machine_for(const Cell& cell, double ratio) {
  CostModel cost{.flops_per_second = 1e15, .bytes_per_second = 1e14, .wire_bytes_per_second = 1e9};
  const TimedStep free = run_timed(cell, cost);
  cost.wire_bytes_per_second *= free.wire / (ratio * free.compute);
  return cost;
}

}  // namespace tessera::testing
