// Gathers run ahead and reductions run beside compute: asserted on the virtual clock, where a step
// of rank 1 of 8 takes what its operations take and not what this machine does. It is held to the
// computed minimum of longest_path.hpp.
//
// Between two micro-batches the first gathers of the next find every slot in use until backward
// ends, so that they are exposed once more: there the minimum is that of the planned memory. So it
// is for lists of modules in pieces, which are reduced together, where backward has come back
// through the first module, and so only take memory from each other. And so it is where parts are
// frozen, where units differ in what they gather and reduce.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/device/device_context.hpp"
#include "tessera/nn/sequential.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tests/promises/longest_path.hpp"
#include "tests/promises/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Step {
  std::vector<Operation> operations;
  double seconds = 0, minimum = 0;
  double compute = 0, wire = 0;  // busy, without the optimizer
  double wire_bytes = 0;
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
      if (op.stream == StreamId::reduce && overlap(op.reads, operations[reduction].reads)) break;
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
constexpr nn::LlamaConfig kModel{.dim = 512,
                                 .n_layers = 8,
                                 .n_heads = 8,
                                 .ffn_dim = 1408,
                                 .vocab_size = 4096,
                                 .max_seq_len = 1024};

constexpr std::int64_t kWhole = 1 << 30, kMatrix = 1 << 20;  // pieces of gradient buffers

// Whether decisions.hpp opens and closes units around each forward.
enum class Opens : std::uint8_t { by_calls, by_hand };

Step run_step(const Cell& cell, const CostModel& cost, std::int64_t piece_bytes = kWhole,
              Opens opens = Opens::by_calls) {
  const RaceCheck check;
  const World world =
      World::emulated(1, 8, check({.executor = ExecutorKind::virtual_, .cost = cost}));
  nn::LlamaConfig config = kModel;
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
      .mesh = mesh_of(world, cell.replicas),
      .precision = {.param = cell.param, .reduce = cell.reduce, .output = cell.output},
      .reshard_after_forward = cell.reshard,
      .prefetch_depth = cell.prefetch_depth,
      .reductions_in_flight = cell.reductions_in_flight,
      .piece_bytes = piece_bytes,
      .offload = cell.offload,
      .ignored = ignored};
  if (cell.by_hand) options.shard_placement_fn = by_columns(options.mesh);
  if (cell.lists) list_blocks(model, options);
  ShardOptions of_last = options;  // which gives what the root's norm takes
  of_last.precision.output.reset();
  for (nn::Module* part : model.parts())
    if (!part->hook())
      fully_shard(*part, part == &model.blocks[model.blocks.size() - 1] ? of_last : options);
  fully_shard(model, options);
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
  Step step;
  for (int k = 0; k < 2; ++k) {  // the second is a steady one
    world.device().synchronize();
    Executor& executor = world.device().context().executor();
    const double start = executor.host_seconds();
    Recorder recorder(world.device(), cost);
    for (int m = 0; m < cell.micro_batches; ++m) {
      const auto batch = [&] { return Tensor::from(tokens, {4, 1024}, world.device()); };
      begin_micro_batch(model, cell.accumulation, m + 1 == cell.micro_batches);
      if (opens == Opens::by_hand && k > 0) decide_before_forward(model);
      const Tensor loss = model.loss(batch(), batch());
      if (opens == Opens::by_hand) decide_before_backward(model);
      (scaler ? scaler->scale(loss) : loss).backward();
    }
    average(ignored, world);
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
  step.plan = shard_plan(model);
  return step;
}

// Compute of 1 PFLOP/s beside memory that is as fast as an accelerator's is to its products, and a
// wire for which the collectives of a step take `ratio` times as long as its compute.
CostModel machine(const Cell& cell, double ratio) {
  CostModel cost{.flops_per_second = 1e15, .bytes_per_second = 1e14, .wire_bytes_per_second = 1e9};
  const Step free = run_step(cell, cost);
  cost.wire_bytes_per_second *= free.wire / (ratio * free.compute);
  return cost;
}

std::vector<Cell> overlap_cells() {
  return {{},
          {.recomputes = true},
          {.recomputes = true, .selectively = true},
          {.reshard = Reshard::never},
          {.reshard = Reshard::to(2)},
          {.replicas = 2},
          {.reshard = Reshard::always},
          {.reshard = Reshard::always, .recomputes = true},
          {.param = bf16},
          {.tied = true, .param = bf16},
          {.micro_batches = 2},
          {.micro_batches = 2, .prefetch_depth = 2},
          {.micro_batches = 2, .accumulation = Accumulation::unsharded},
          {.micro_batches = 2, .replicas = 2, .accumulation = Accumulation::in_replicas},
          {.param = bf16, .output = f32},
          {.prefetch_depth = 2, .reductions_in_flight = 2},
          {.encodes = true},
          {.ragged = true},
          {.lists = true},
          {.by_hand = true},
          {.freezes = true},
          {.reshard = Reshard::always, .freezes = true, .stored = e4m3},
          {.param = bf16, .by_hand = true, .stored = bf16, .ignores = true},
          {.param = f16, .scales_loss = true},
          {.param = f16, .reduce = f16, .scales_loss = true},
          {.param = bf16, .reduce = bf16},
          {.orthogonalises = true},
          {.offload = Offload::cpu},
          {.prefetch_depth = 2, .offload = Offload::cpu}};
}

}  // namespace

TEST_CASE("a step takes at most 1.01 of the computed minimum", "[promises][fsdp2-112]") {
  for (const Cell& cell : overlap_cells())
    for (const double ratio : {0.25, 0.5, 0.9, 1.5, 3.}) {
      const Step step = run_step(cell, machine(cell, ratio));
      INFO(cell << ", ratio " << ratio << ": " << step.seconds << " s, minimum " << step.minimum
                << " s, compute " << step.compute << " s, wire " << step.wire << " s");
      // All times are the cost model's, the same in every run. The wire's have a part that does not
      // depend on its speed, the casts in front of gathers: less than 1 %; encodings, and copies to
      // the host and its update: less than 2 %. Gradients of what units leave alone are summed on
      // compute: the wire that was measured was slow, so that compute seemed 7 % longer.
      const bool offloads = cell.offload == Offload::cpu;
      CHECK(step.wire / step.compute == Approx(ratio).epsilon(cell.ignores               ? 0.08
                                                              : cell.encodes || offloads ? 0.02
                                                                                         : 0.01));
      // The same times, some thousand, summed in another order.
      CHECK(step.seconds >= step.minimum * (1 - 1e-9));
      // On the one stream to and from the host the copy of the next gather comes behind that of a
      // reduction, which waits for the wire, unless gathers are two ahead.
      CHECK(step.seconds <= (offloads && cell.prefetch_depth == 1 ? 1.03 : 1.01) * step.minimum);
    }
}

// The one combination that misses 1.01: 1.011, and 1.034 with two gathers ahead, where the wire
// takes 1.5 times as long as compute. What it waits for has not been found.
TEST_CASE("with frozen parts that are gathered twice a step takes at most 1.04 of the minimum",
          "[promises]") {
  for (const int depth : {1, 2})
    for (const double ratio : {0.25, 0.5, 0.9, 1.5, 3.}) {
      const Cell cell{.reshard = Reshard::always, .freezes = true, .prefetch_depth = depth};
      const Step step = run_step(cell, machine(cell, ratio));
      INFO(cell << ", ratio " << ratio << ": " << step.seconds << " s, minimum " << step.minimum);
      CHECK(step.seconds <= 1.04 * step.minimum);
    }
}

// A block that is opened before the root's call takes its slot, and its place on the wire, from
// what is called first.
TEST_CASE("with a block that is opened by hand a step takes at most 1.04 of the minimum",
          "[promises]") {
  for (const Cell& cell : {Cell{}, Cell{.recomputes = true}, Cell{.by_hand = true}})
    for (const double ratio : {0.25, 0.5, 0.9, 1.5, 3.}) {
      const Step step = run_step(cell, machine(cell, ratio), kWhole, Opens::by_hand);
      INFO(cell << ", ratio " << ratio << ": " << step.seconds << " s, minimum " << step.minimum);
      CHECK(step.seconds >= step.minimum * (1 - 1e-9));
      CHECK(step.seconds <= 1.04 * step.minimum);
    }
}

// In pieces reductions begin earlier, so that the computed minimum is lower. It is not quite
// reached: fewer gradients are in flight. What is promised of whole buffers holds, but for slices
// of the head that are gathered twice: of a whole one the only slice stays from forward to
// backward. A piece is a matrix of the model, in the dtype in which it is reduced.
TEST_CASE("a step in pieces takes at most 1.01 of the minimum of one with whole gradient buffers",
          "[promises]") {
  for (const Cell& cell : overlap_cells())
    for (const double ratio : {0.25, 0.5, 0.9, 1.5, 3.}) {
      const CostModel cost = machine(cell, ratio);
      const Step whole = run_step(cell, cost),
                 step = run_step(cell, cost, kMatrix * size_bytes(cell.reduce) / 4);
      INFO(cell << ", ratio " << ratio << ": " << step.seconds << " s, minimum " << step.minimum
                << " s; whole " << whole.seconds << " s, minimum " << whole.minimum << " s");
      CHECK(step.seconds >= step.minimum * (1 - 1e-9));
      const double again = std::max(0.0, step.wire - whole.wire);
      if (!cell.lists) CHECK(step.seconds <= 1.01 * whole.minimum + again);
      CHECK(step.seconds <= (cell.lists ? 1.01 : 1.05) * step.minimum);
      CHECK(step.plan.arena_bytes < whole.plan.arena_bytes);
    }
}

TEST_CASE(
    "where communication is cheaper than compute only the first gathers and the last "
    "reductions are exposed",
    "[promises]") {
  for (const Cell& cell : {Cell{}, Cell{.recomputes = true}, Cell{.param = bf16}})
    for (const double ratio : {0.25, 0.5, 0.9}) {
      // Recomputing makes a step's compute 4/3 as long, so that forward alone is as dear as its
      // gathers at 3/4.
      if (cell.recomputes && ratio > 0.75) continue;
      INFO(cell << ", ratio " << ratio);
      const Step step = run_step(cell, machine(cell, ratio));
      const auto gathers = step.all(StreamId::gather, "all_gather "),
                 first_block = step.all(StreamId::gather, "layers.0"),
                 last_block = step.all(StreamId::reduce, "layers.0");
      REQUIRE(gathers.size() == 19);  // root, embedding and head once; 8 blocks twice
      REQUIRE(first_block == std::vector<std::size_t>{gathers[2], gathers[18]});
      REQUIRE(last_block.size() == 1);
      // Looking up embeddings hides nothing: the first block's gather is exposed with those before
      // it, and its reduction with that of the embedding, which backward reaches last.
      const double first = step.first_reader(gathers[2]).begin,
                   last = step.operations[last_block[0]].begin;
      CHECK(first == Approx(step.operations[gathers[2]].end));
      CHECK(step.idle(first, last) == 0);  // an operation begins at the very time another ends
      // Run ahead: the gather of a unit begins before compute gets to the unit before it.
      for (std::size_t k = 2; k + 1 < gathers.size(); ++k)
        CHECK(step.begin_of_gather(gathers[k + 1]) <= step.first_reader(gathers[k]).begin);
      // Beside compute: all others end before compute does.
      for (const std::size_t r : step.all(StreamId::reduce, "reduce_scatter "))
        if (r < last_block[0]) CHECK(step.operations[r].end <= last);
    }
}

TEST_CASE("as many reductions are in flight, and gathers ahead, as the options say",
          "[promises][fsdp2-063][fsdp2-064]") {
  for (const int count : {1, 2, 3}) {
    INFO(count << " in flight");
    // Without gathers in backward a slow wire is all for reductions, which pile up.
    const Cell cell{.reshard = Reshard::never, .reductions_in_flight = count};
    const Step step = run_step(cell, machine(cell, 3));
    const auto reductions = step.all(StreamId::reduce, ".layers.");  // all of one size
    std::ptrdiff_t most = 0;
    for (const std::size_t r : reductions) {
      const double from = step.filled_from(r);
      most = std::max(most, std::count_if(reductions.begin(), reductions.end(), [&](std::size_t o) {
                        return o < r && step.operations[o].end > from * (1 + 1e-12);
                      }));
    }
    CHECK(most >= count);
  }
  for (const int depth : {1, 2, 3}) {
    INFO("prefetch depth " << depth);
    // On a fast wire gathers are as far ahead as slots let them be.
    const Cell cell{.prefetch_depth = depth};
    const Step step = run_step(cell, machine(cell, 0.1));
    const auto gathers = step.all(StreamId::gather, ".layers.");
    std::ptrdiff_t most = 0;
    for (std::size_t k = 0; k < gathers.size(); ++k) {
      // While a block is computed, but for its last operation, nobody gives a slot back.
      const double from = step.first_reader(gathers[k]).begin * (1 + 1e-12);
      most = std::max(most, std::count_if(gathers.begin(), gathers.end(), [&](std::size_t g) {
                        return g > gathers[k] && step.begin_of_gather(g) < from;
                      }));
    }
    CHECK(most >= depth);
  }
}

TEST_CASE("reductions run beside gathers", "[promises][fsdp2-114]") {
  // Where the wire is what a step takes, one communicator would take all of it in a row.
  const Cell cell{.reshard = Reshard::always};
  for (const std::int64_t piece_bytes : {kWhole, kMatrix}) {
    const Step step = run_step(cell, machine(cell, 3), piece_bytes);
    CHECK(step.seconds < 0.8 * step.wire);
  }
}

TEST_CASE("a gather waits for its unit's update, not for what is computed before its call",
          "[promises][fsdp2-113]") {
  constexpr std::int64_t kWidth = 2048;
  // A product takes 17 ms, the gather of a unit and its reduction 10 ms each.
  const CostModel cost{
      .flops_per_second = 1e12, .bytes_per_second = 1e15, .wire_bytes_per_second = 1.7e9};
  const RaceCheck check;
  const World world =
      World::emulated(1, 2, check({.executor = ExecutorKind::virtual_, .cost = cost}));
  nn::Linear heavy(kWidth, kWidth), unit(kWidth, kWidth);  // heavy is no unit's
  fully_shard(unit, {.mesh = DeviceMesh::flat(world)});
  for (nn::Linear* const layer : {&heavy, &unit}) nn::init(*layer, {1}, world.device());
  optim::Sgd of_heavy(heavy.parameters(), {.lr = 0.1}), of_unit(unit.parameters(), {.lr = 0.1});
  const Tensor x = Tensor::zeros({kWidth, kWidth}, f32, world.device());
  Recorder recorder(world.device(), cost);
  for (int step = 0; step < 5; ++step) {
    mean_square(unit(heavy(x))).backward();
    for (optim::Sgd* const optimizer : {&of_heavy, &of_unit}) {
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  double compute = 0, end = 0, wire = 0;
  for (const Operation& op : recorder.operations) {
    (op.stream == StreamId::compute ? compute : wire) += op.seconds;
    end = std::max(end, op.end);
  }
  const double begin = recorder.operations.front().begin;
  CHECK(wire > 0.1 * compute);
  CHECK(end - begin < 1.001 * compute + wire / 10);  // hidden but for one, of the first call
}

TEST_CASE("what backward does not read is not gathered again, and nothing waits for it",
          "[promises]") {
  constexpr std::int64_t kWidth = 2048;
  // A product takes 17 ms, the gather of a unit 84 ms. Only what backward reaches last is trained,
  // so that no other reduction hides its gather.
  const CostModel cost{
      .flops_per_second = 1e12, .bytes_per_second = 1e15, .wire_bytes_per_second = 2e8};
  struct Shift final : nn::Module {
    Shift() { register_parameter("by", by); }
    Tensor operator()(const Tensor& x) {
      return call([&] { return x + by.value(); });
    }
    Parameter by{{kWidth, kWidth}, Initializer::normal(0, 1)};
  };
  struct Took {
    double seconds = 0, gather = 0;
    std::ptrdiff_t gathers = 0;
  };
  const auto run = [&](bool unshards) {
    const RaceCheck check;
    const World world =
        World::emulated(1, 2, check({.executor = ExecutorKind::virtual_, .cost = cost}));
    nn::Sequential model;
    Shift& shift = model.push_back(std::make_unique<Shift>());
    for (int k = 0; k < 2; ++k) model.push_back(std::make_unique<nn::Linear>(kWidth, kWidth));
    model.apply<nn::Linear>([](nn::Linear& layer) {
      for (Parameter p : layer.parameters()) p.freeze();
    });
    const ShardOptions options{.mesh = DeviceMesh::flat(world),
                               .reshard_after_forward = Reshard::always,
                               .piece_bytes = kWhole};
    fully_shard(shift, options);
    model.apply<nn::Linear>([&](nn::Linear& layer) { fully_shard(layer, options); });
    fully_shard(model, options);
    nn::init(model, {1}, world.device());
    set_unshard_in_backward(shift, unshards);
    const Tensor x = Tensor::zeros({kWidth, kWidth}, f32, world.device());
    Took took;
    for (int k = 0; k < 3; ++k) {  // the last is a steady one
      world.device().synchronize();
      const double start = world.device().context().executor().host_seconds();
      Recorder recorder(world.device(), cost);
      mean_square(model(x)).backward();
      world.device().synchronize();
      took.seconds = world.device().context().executor().host_seconds() - start;
      took.gathers = 0;
      for (const Operation& op : recorder.operations)
        if (op.is("all_gather ")) ++took.gathers, took.gather = op.seconds;
    }
    return took;
  };
  const Took with = run(true), without = run(false);
  CHECK(with.gathers == 6);
  CHECK(without.gathers == 5);
  // Backward of the layer behind it, one product, hides as much of the gather; all else takes less
  // than 1 %.
  const double product = 2. * kWidth * kWidth * kWidth / cost.flops_per_second;
  CHECK(with.seconds - without.seconds == Approx(with.gather - product).epsilon(0.01));
}
